"""The errors of dspark_hf. Each one is also the built-in error that transformers would raise in its place."""


class DSparkError(Exception):
    """Base class: `except DSparkError` catches everything that this package raises on purpose."""


class UnsupportedCheckpointError(DSparkError, ValueError):
    """The folder or repository holds something that is not a drafter we can open.

    Args:
        source: the folder or repository id that was opened.
        found: what it holds, as a noun phrase ("an EAGLE-3 head").
        remedy: what to do instead, one sentence.
    """

    def __init__(self, source: str, found: str, remedy: str):
        self.source, self.found, self.remedy = source, found, remedy
        super().__init__(f"{source} holds {found}, which is not a drafter that dspark_hf can open. {remedy}")


class CheckpointFieldError(DSparkError, ValueError):
    """A field of a checkpoint's `config.json` is missing or has a value that cannot be right.

    Args:
        source: the folder or repository id that was opened.
        field: the name of the field, as it stands in that format (dotted where it is nested).
        problem: what was found and what was expected.
    """

    def __init__(self, source: str, field: str, problem: str):
        self.source, self.field, self.problem = source, field, problem
        super().__init__(f"{source}: `{field}` {problem}")


class IncompleteCheckpointError(DSparkError, ValueError):
    """The tensors of a checkpoint do not match what its config declares.

    Args:
        source: the folder or repository id that was opened.
        missing: names the config asks for and the file lacks.
        unexpected: names the file has and the config gives no place to.
        mismatched: `(name, shape in the file, shape by the config)`.
    """

    def __init__(
        self,
        source: str,
        missing: list[str],
        unexpected: list[str],
        mismatched: list[tuple[str, list[int], list[int]]],
    ):
        self.source, self.missing, self.unexpected, self.mismatched = source, missing, unexpected, mismatched
        parts = []
        if missing:
            parts.append(f"missing tensors: {', '.join(missing)}")
        if unexpected:
            parts.append(f"tensors without a place: {', '.join(unexpected)}")
        if mismatched:
            shapes = ", ".join(f"{name} is {found}, expected {expected}" for name, found, expected in mismatched)
            parts.append(f"wrong shapes: {shapes}")
        super().__init__(
            f"The weights of {source} do not fit its config.json ({'; '.join(parts)}). "
            "The config may belong to another checkpoint, or the download is incomplete: fetch both again."
        )


class AlignmentError(DSparkError, ValueError):
    """A drafter must not run with this target.

    Args:
        field: what differs.
        target_value: what the target has.
        drafter_value: what the drafter needs.
        remedy: what to do, one sentence.
    """

    def __init__(self, field: str, target_value: object, drafter_value: object, remedy: str):
        self.field, self.target_value, self.drafter_value, self.remedy = field, target_value, drafter_value, remedy
        super().__init__(
            f"This drafter cannot draft for this target: {field} is {target_value} in the target "
            f"and {drafter_value} in the drafter. {remedy}"
        )


class UnsupportedGenerationError(DSparkError, ValueError):
    """`generate` was asked for something that speculative decoding with a drafter does not do exactly."""


class UnknownTargetError(DSparkError, ValueError):
    """No drafter that could be used is known for a target.

    Args:
        target: the target as it was named; empty for a model without a name.
        found: what is known of it instead, one sentence; empty where nothing is.
    """

    def __init__(self, target: str, found: str = ""):
        self.target, self.found = target, found
        super().__init__(
            f"{found or f'No drafter is known for {target}.'} There are three ways on: name a drafter "
            "(`DSparkDrafter.from_pretrained(...)`, `--drafter`); if this is a fine-tuned or quantized copy, name the "
            "model that it was made from (`dspark-hf drafters` lists those with a drafter); or train one, with "
            f"`dspark-hf train --target {target or '...'}`."
        )


class HubError(DSparkError, OSError):
    """The Hub said no, or was out of reach.

    Args:
        repo_id: the repository that something was to be pushed to.
        status: of HTTP; `None` where no answer came.
        found: what the server, or the connection, said.
        remedy: what to do, one sentence.
    """

    def __init__(self, repo_id: str, status: int | None, found: str, remedy: str):
        self.repo_id, self.status, self.found, self.remedy = repo_id, status, found, remedy
        answered = "the connection failed" if status is None else f"the Hub answered {status}"
        super().__init__(f"{repo_id} was not pushed: {answered} ({found}). {remedy}")
