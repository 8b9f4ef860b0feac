"""Draws the figures of `docs/`, from real rounds of the demo's pair: `python docs/figures.py`.

Needs matplotlib and the demo's target. Float32 and drafts of a constant length, so that a second run draws the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib
import torch

from dspark_hf import DSparkConfig, Trace
from dspark_hf.candidate_generator import Draft
from dspark_hf.committing import Committer
from dspark_hf.comparison import Pair, PairSettings, encode_prompt, load_pair
from dspark_hf.modeling_dspark import BlockMasks
from dspark_hf.sampling import probabilities, residual

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

FOLDER = Path(__file__).parent / "figures"
GIVEN, ACCEPTED, REJECTED, UNUSED, BONUS = "#e4e4e4", "#b7e0b7", "#f3b0a8", "#f7f7f7", "#a9c9ec"

PROMPTS = {
    "arithmetic": "A basket holds 12 apples. Tom takes 5 and puts 3 back. How many apples are in the basket?",
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "chat": "Give me three tips for a good night's sleep.",
}


def main() -> None:
    pyplot.rcParams.update({"font.size": 8, "savefig.dpi": 130})
    FOLDER.mkdir(exist_ok=True)
    pair = load_pair(PairSettings(dtype="float32", device="cpu"))
    pair.drafter.generation_config.num_assistant_tokens_schedule = "constant"
    traces = {name: trace_of(pair, prompt) for name, prompt in PROMPTS.items()}
    draw_rounds(pair, traces["arithmetic"], FOLDER / "rounds.png")
    draw_passes(traces, FOLDER / "passes.png")
    draw_rejection(pair, PROMPTS["chat"], FOLDER / "rejection.png")
    draw_masks(FOLDER / "masks.png")


def trace_of(pair: Pair, prompt: str) -> Trace:
    with pair.drafter.trace() as trace:
        pair.target.generate(
            **encode_prompt(pair, prompt), assistant_model=pair.drafter, do_sample=False, max_new_tokens=64
        )
    return trace


def draw_rounds(pair: Pair, trace: Trace, path: Path, num_rounds: int = 8) -> None:
    """The first rounds, a line each: anchor, draft tokens with their confidences, and the token of the target."""
    ids = committed_ids(pair, PROMPTS["arithmetic"], trace)
    width = pair.drafter.config.num_draft_tokens
    figure, panel = pyplot.subplots(figsize=(8.4, 0.42 * num_rounds + 0.6), layout="constrained")
    place = 0
    for line, one in enumerate(trace.rounds[:num_rounds]):
        y = num_rounds - line
        cell(panel, 0, y, pair.tokenizer.decode(ids[place]), GIVEN)
        for position, token in enumerate(one.proposed):
            color = ACCEPTED if position < one.accepted else REJECTED if position == one.accepted else UNUSED
            confidence = one.confidence[position] if one.confidence else None
            cell(panel, 1 + position, y, pair.tokenizer.decode(token), color, confidence)
        place += one.num_new_tokens
        cell(panel, width + 1.3, y, pair.tokenizer.decode(ids[place]), BONUS)
        panel.text(width + 2.45, y + 0.45, f"{one.num_new_tokens}", va="center", ha="center")
    titles = ["anchor", *(f"draft {position}" for position in range(1, 1 + width))]
    for column, title in [*enumerate(titles), (width + 1.3, "target")]:
        panel.text(column + 0.47, num_rounds + 1.15, title, ha="center")
    panel.text(width + 2.45, num_rounds + 1.15, "tokens", ha="center")
    panel.set(xlim=(-0.1, width + 2.9), ylim=(0.9, num_rounds + 1.5))
    panel.axis("off")
    save(figure, path)


def committed_ids(pair: Pair, prompt: str, trace: Trace) -> list[int]:
    """The answer, from its first token on: the anchor of the first round."""
    inputs = encode_prompt(pair, prompt)
    output = pair.target.generate(**inputs, do_sample=False, max_new_tokens=trace.num_new_tokens)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def cell(panel: Axes, x: float, y: float, text: str, color: str, confidence: float | None = None) -> None:
    panel.add_patch(Rectangle((x, y), 0.94, 0.9, facecolor=color, edgecolor="0.6", linewidth=0.6))
    shown = repr(text)[1:-1].replace("$", r"\$").strip() or "␣"
    panel.text(
        x + 0.47, y + (0.45 if confidence is None else 0.6), shown, ha="center", va="center", family="monospace"
    )
    if confidence is not None:
        panel.text(x + 0.47, y + 0.2, f"{100 * confidence:.0f} %", ha="center", va="center", fontsize=6, color="0.35")


def draw_passes(traces: dict[str, Trace], path: Path) -> None:
    """Tokens of the answer against passes of the target, the prefill being the first."""
    figure, panel = pyplot.subplots(figsize=(4.6, 3.2), layout="constrained")
    for name, trace in traces.items():
        totals = [1]
        for one in trace.rounds:
            totals.append(totals[-1] + one.num_new_tokens)
        label = f"{name}, τ = {trace.summary().acceptance_length:.2f}"
        panel.plot(range(1, 1 + len(totals)), totals, drawstyle="steps-post", label=label)
    longest = max(trace.num_new_tokens for trace in traces.values())
    panel.plot([1, longest], [1, longest], color="0.5", linestyle="--", label="plain decoding")
    panel.set(xlabel="passes of the target", ylabel="tokens of the answer")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, loc="lower right")
    save(figure, path)


def draw_rejection(pair: Pair, prompt: str, path: Path, num_tokens: int = 6) -> None:
    """A position of a sampled draft that both distributions share by about a half: what stands, and what is left."""
    recorded: list[tuple[torch.Tensor, Draft]] = []
    commit = Committer.commit

    def record(self: Committer, logits: torch.Tensor, draft: Draft, *args: Any, **kwargs: Any) -> list[int]:
        recorded.append((logits, draft))
        return commit(self, logits, draft, *args, **kwargs)

    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 48}
    with patch.object(Committer, "commit", record):
        pair.target.generate(**encode_prompt(pair, prompt), assistant_model=pair.drafter, **options)
    # The first position of each draft: nothing else of the draft comes in.
    both = [
        (probabilities(logits[0, 0]), draft.probabilities((0, 0), logits.shape[-1]))
        for logits, draft in recorded
        if draft.length
    ]
    target, drafted = min(both, key=lambda pq: abs(torch.minimum(*pq).sum().item() - 0.6))
    shown = torch.maximum(target, drafted).topk(num_tokens).indices
    left = residual(target, drafted)
    labels = [repr(pair.tokenizer.decode(token))[1:-1] for token in shown.tolist()] + ["all others"]
    figure, (panel, after) = pyplot.subplots(1, 2, figsize=(8.4, 2.8), sharey=True, layout="constrained")
    places = range(len(labels))
    panel.bar([x - 0.2 for x in places], heights(target, shown), 0.38, color=BONUS, label="target p")
    panel.bar([x + 0.2 for x in places], heights(drafted, shown), 0.38, color=GIVEN, label="drafter q")
    stands = torch.minimum(target, drafted)
    panel.bar(
        [x + 0.2 for x in places], heights(stands, shown), 0.38, color=ACCEPTED, label="of it accepted: min(p, q)"
    )
    panel.set_title(f"draft token: stands with probability {stands.sum().item():.2f}")
    after.bar(places, heights(left, shown), 0.5, color=REJECTED, label="(p - q)+, normalised")
    after.set_title("after a rejection")
    for axes in (panel, after):
        axes.set_xticks(places, labels, rotation=30, ha="right")
        axes.legend(frameon=False)
    panel.set_ylabel("probability")
    save(figure, path)


def heights(probs: torch.Tensor, shown: torch.Tensor) -> list[float]:
    """Of the tokens that are shown, and of all others together."""
    of_shown = probs[shown]
    return [*of_shown.tolist(), (probs.sum() - of_shown.sum()).clamp_min(0).item()]


def draw_masks(path: Path, num_context: int = 8) -> None:
    """Who sees whom in a draft layer, as the drafter's own masks say."""
    sizes: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 1, "block_size": 6, "mask_token_id": 0}
    layers = {
        "full layer": ("full_attention", {}),
        "sliding layer of 4, from the anchor": ("sliding_attention", {"sliding_window": 4}),
        "full layer, context_window=4": ("full_attention", {"context_window": 4}),
    }
    figure, panels = pyplot.subplots(1, len(layers), figsize=(8.4, 1.7), layout="constrained")
    for panel, (title, (kind, settings)) in zip(panels, layers.items(), strict=True):
        config = DSparkConfig(**sizes, target_layer_ids=[0], num_hidden_layers=1, layer_types=[kind], **settings)
        draw_mask(panel, visible(config, kind, num_context), num_context)
        panel.set_title(title)
    panels[0].set_ylabel("block")
    save(figure, path)


def visible(config: DSparkConfig, kind: str, num_context: int) -> torch.Tensor:
    """`[S, T + S]` booleans: which keys each block position sees."""
    size = config.block_size
    masks = BlockMasks(config, None, size, torch.float32)
    first = masks.first_key(num_context + size)
    mask = masks.get(kind, num_context + size - first, torch.device("cpu"), first)
    seen = torch.ones(size, num_context + size - first, dtype=torch.bool) if mask is None else mask[0, 0] == 0
    return torch.cat((torch.zeros(size, first, dtype=torch.bool), seen), dim=-1)


def draw_mask(panel: Axes, seen: torch.Tensor, num_context: int) -> None:
    size = seen.shape[0]
    for row, keys in enumerate(seen.tolist()):
        for column, is_seen in enumerate(keys):
            color = (BONUS if column < num_context else ACCEPTED) if is_seen else "white"
            panel.add_patch(Rectangle((column, size - 1 - row), 1, 1, facecolor=color, edgecolor="0.7", linewidth=0.5))
    names: Sequence[str] = ["anchor", *["mask"] * (size - 1)]
    panel.set_yticks([size - 0.5 - row for row in range(size)], names, fontsize=6)
    panel.set_xticks([num_context / 2, num_context + size / 2], ["context", "block"])
    panel.set(xlim=(0, num_context + size), ylim=(0, size), aspect="equal")
    panel.tick_params(length=0)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
