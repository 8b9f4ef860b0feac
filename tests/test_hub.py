"""Publishing: the card says what was measured, one commit carries everything, what should stay here stays here."""

import json
import logging
from dataclasses import replace
from math import nan
from pathlib import Path
from shutil import copytree

import kit
import pytest
import torch
from hub_stand_in import INVALID_TOKEN, TOKEN, Commit, Fault, HubStandIn, running_hub
from huggingface_hub import ModelCard, constants
from safetensors import safe_open
from test_benchmark import pair  # noqa: F401  (a fixture)
from test_demo import FIXTURE

from dspark_hf import Calibration, DSparkDrafter
from dspark_hf.calibration import PositionReport, Reliability
from dspark_hf.cli import main
from dspark_hf.errors import HubError
from dspark_hf.evaluation import EvaluationSettings, run_evaluation
from dspark_hf.hub import make_model_card, push_drafter_to_hub

# The client itself sends large files in a way that its own library is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")

REPO = "someone/tiny-drafter"
TARGET = "org/tiny-target"
CARD = "---\nlicense: apache-2.0\n---\n# A target\n"
FILES = [
    "README.md",
    "config.json",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
    "generation_config.json",
    "model.safetensors",
]


@pytest.fixture
def hub(monkeypatch) -> HubStandIn:
    """The stand-in, which the real client takes for the Hub; waiting between retries takes no time."""
    with running_hub() as stand_in:
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield stand_in


@pytest.fixture
def drafter() -> DSparkDrafter:
    return kit.new_drafter(target_model_name_or_path=TARGET)


@pytest.fixture(scope="module")
def results(pair, tmp_path_factory) -> tuple[DSparkDrafter, Path]:  # noqa: F811
    """A drafter of `org/tiny-target`, and what a real evaluation wrote about it."""
    folder = tmp_path_factory.mktemp("evaluation")
    copytree(pair["target"], folder / "tiny-target")
    prompts = folder / "sums.jsonl"
    prompts.write_text('{"prompt": "Add one"}\n{"prompt": "Add two"}\n')
    file = folder / "results.json"
    options = {**pair, "target": str(folder / "tiny-target"), "drafter": [pair["drafter"]]}
    run_evaluation(EvaluationSettings(**options, prompts=[str(prompts)], json=str(file), max_new_tokens=8))
    return DSparkDrafter.from_pretrained(pair["drafter"], target_model_name_or_path=TARGET), file


def calibrated(num_positions: int) -> Calibration:
    curve = Reliability([4], [0.5], [0.5])
    numbers = {"num_reached": 9, "survival_rate": 0.5, "brier_before": 0.2, "brier_after": 0.1}
    numbers |= {"temperature": 1.5, "ece_before": 0.041, "ece_after": 0.024, "before": curve, "after": curve}
    positions = [PositionReport(1 + k, auc=nan if k else 0.8125, **numbers) for k in range(num_positions)]
    return Calibration([1.5] * num_positions, positions, {"fit": 40, "report": 30}, {"decoding": "greedy"})


class TestCard:
    def test_a_drafter_alone_says_what_it_is_and_claims_nothing(self, drafter):
        card = make_model_card(drafter, REPO)
        assert card.data.to_dict() == {
            "base_model": TARGET,
            "base_model_relation": "adapter",
            "library_name": "dspark-hf",
            "pipeline_tag": "text-generation",
            "tags": ["dspark", "speculative-decoding", "custom_generate"],
        }
        headings = [line for line in card.text.splitlines() if line.startswith("#")]
        assert headings == ["# tiny-drafter", "## How to use", "## The drafter"]
        num_parameters = sum(p.numel() for p in drafter.parameters())
        assert card.text.endswith(
            "## The drafter\n\n"
            "| | |\n"
            "|---|---|\n"
            "| draft tokens per block | 4 |\n"
            "| draft layers | 2 (qwen3), width 32 |\n"
            "| tapped layers of the target (-1: the embedding) | -1, 0, 2 |\n"
            "| Markov head | vanilla, rank 6 |\n"
            "| confidence head | yes |\n"
            "| ids that it proposes | 97 of 97 |\n"
            f"| parameters | {num_parameters:,}, float32 |\n"
            "| taken from the target, not stored here | embedding and head |\n"
        )

    def test_how_to_use_is_python_with_the_names_of_this_pair(self, drafter):
        first, second = make_model_card(drafter, REPO).text.split("```python\n")[1:]
        for block in (first, second):
            compile(block.split("```")[0], "card", "exec")
        assert f'from_pretrained("{TARGET}", dtype="auto"' in first
        assert f'DSparkDrafter.from_pretrained("{REPO}"' in first
        assert "assistant_model=drafter" in first
        assert f'custom_generate="{REPO}", trust_remote_code=True' in second

    def test_a_dflash_drafter_is_called_one(self):
        heads = {"markov_head_type": "none", "enable_confidence_head": False, "sample_from_anchor": False}
        card = make_model_card(kit.new_drafter(**heads, target_model_name_or_path=TARGET), REPO)
        assert "A [DFlash](https://arxiv.org/abs/2602.06036) drafter" in card.text
        assert "| confidence head | none |\n" in card.text

    def test_numbers_of_an_evaluation(self, results):
        drafter, file = results
        report = json.loads(file.read_text())
        datasets = report["drafters"][FIXTURE.name]
        card = make_model_card(drafter, REPO, results=file)
        (result,) = card.data.eval_results
        assert card.data.model_name == "tiny-drafter"
        assert (result.dataset_name, result.metric_type) == ("sums", "acceptance_length")
        assert result.metric_value == round(datasets["sums"]["drafts"]["acceptance_length"], 3)
        assert (
            "## Acceptance and speed\n\nWith tiny-target, float32, greedy, batch 1, at most 8 new tokens;" in card.text
        )
        assert "### Acceptance of full drafts\n\n| dataset | drafter | prompts |" in card.text
        assert f"× {datasets['all']['speed']['auto']['ratio_to_plain']:.2f} |" in card.text
        assert "Lossless audit: 4 of 4 texts identical, 0 beyond rounding." in card.text

    def test_of_several_drafters_only_the_one_of_this_name(self, results, tmp_path):
        drafter, file = results
        report = json.loads(file.read_text())
        (numbers,) = report["drafters"].values()
        report["drafters"] = {"other": numbers, "tiny-drafter": numbers}
        both = tmp_path / "both.json"
        both.write_text(json.dumps(report))
        card = make_model_card(drafter, REPO, results=both)
        assert "| sums | tiny-drafter |" in card.text
        assert "other" not in card.text
        with pytest.raises(ValueError, match="about other, tiny-drafter, none of which is called someone/third"):
            make_model_card(drafter, "someone/third", results=both)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda report: report.pop("plain"), r"is not what `dspark-hf eval --json` writes \(KeyError\('plain'\)"),
            (lambda report: report.update(drafters=[1]), "is not what `dspark-hf eval --json` writes"),
            (
                lambda report: report["environment"].update(target="org/tiny-target-base"),
                "about the target org/tiny-target-base, but this drafter is for org/tiny-target",
            ),
            (
                lambda report: report["drafters"][FIXTURE.name]["all"]["drafts"].update(
                    acceptance_rate_per_position=[0.5]
                ),
                "about drafts of 1 tokens, but this drafter proposes",
            ),
        ],
    )
    def test_results_about_something_else_are_refused(self, results, change, message, tmp_path):
        drafter, file = results
        report = json.loads(file.read_text())
        change(report)
        changed = tmp_path / "changed.json"
        changed.write_text(json.dumps(report))
        with pytest.raises(ValueError, match=message):
            make_model_card(drafter, REPO, results=changed)

    def test_a_quantized_copy_of_the_target_counts(self, results, tmp_path):
        drafter, file = results
        report = json.loads(file.read_text())
        report["environment"]["target"] = "other/Tiny-Target-AWQ (from somewhere)"
        changed = tmp_path / "changed.json"
        changed.write_text(json.dumps(report))
        assert "With other/Tiny-Target-AWQ (from somewhere), " in make_model_card(drafter, REPO, results=changed).text

    def test_calibration(self, drafter):
        drafter.calibration = calibrated(2)
        text = make_model_card(drafter, REPO).text
        assert "| confidence head | yes, with calibrated temperatures |" in text
        assert text.endswith(
            "## Calibration of confidences\n\n"
            "Survival of full drafts up to a position, before and after temperatures were fitted (to 40 drafts; the "
            "numbers are those of 30 others), greedy.\n\n"
            "| position | temperature | survival % | ECE % before | ECE % after | AUC |\n"
            "|---:|---:|---:|---:|---:|---:|\n"
            "| 1 | 1.50 | 50.0 | 4.1 | 2.4 | 0.812 |\n"
            "| 2 | 1.50 | 50.0 | 4.1 | 2.4 |  |\n"
        )

    def test_temperatures_without_numbers_make_no_section(self, drafter):
        drafter.calibration = Calibration([1.5] * 4)
        assert "## Calibration" not in make_model_card(drafter, REPO).text

    def test_training(self, drafter, tmp_path):
        state, data = tmp_path / "trainer_state.json", tmp_path / "rows.provenance.json"
        log = [{"step": 10, "loss": 2.0}, {"step": 20, "train_runtime": 2700.4, "train_loss": 1.5}]
        state.write_text(json.dumps({"global_step": 1234, "epoch": 2.0, "log_history": log}))
        decoding = {"temperature": 0.8, "top_p": 1.0}
        data.write_text(json.dumps({"target": TARGET, "dtype": "bfloat16", "decoding": decoding}))
        assert make_model_card(drafter, REPO, training=[state, data]).text.endswith(
            "## Training\n\n"
            "| | |\n"
            "|---|---|\n"
            "| steps | 1,234 |\n"
            "| epochs | 2.00 |\n"
            "| wall time | 45 minutes |\n"
            "| mean training loss | 1.500 |\n"
            "| responses of | org/tiny-target |\n"
            "| decoding of the responses | sampled, temperature 0.8, top_p 1.0 |\n"
            "| dtype of the target | bfloat16 |\n"
        )

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "is not a valid JSON file"),
            ("[]", "holds list, expected an object"),
            ("{}", r"is neither the `trainer_state.json` of a training run nor a `.provenance.json`"),
            (
                '{"target": "org/other", "decoding": "greedy"}',
                "is about the target org/other, but this drafter is for",
            ),
        ],
    )
    def test_other_files_are_refused(self, drafter, content, message, tmp_path):
        file = tmp_path / "some.json"
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            make_model_card(drafter, REPO, training=[file])


class TestPush:
    def test_one_commit_with_everything(self, hub, drafter):
        drafter.calibration = replace(calibrated(4), provenance={"target": TARGET, "drafter": "/home/me/drafter"})
        report = push_drafter_to_hub(drafter, REPO, token=TOKEN, commit_message="First", private=True)
        repository = hub.repositories[REPO]
        first, commit = repository.branches["main"]
        files = {name: content for name, content in commit.files.items() if name not in first.files}
        assert repository.visibility == "private"
        assert commit.message == "First"
        assert sorted(files) == sorted([*FILES, "dspark_calibration.json"])
        assert {name: len(content) for name, content in files.items()} == report.files
        assert files["README.md"].decode() == report.card
        assert report.commit.commit_url == f"{hub.endpoint}/{REPO}/commit/{commit.sha}"
        assert report.commit.pr_url is None
        assert json.loads(files["dspark_calibration.json"])["provenance"] == {"target": TARGET, "drafter": "drafter"}

    def test_what_was_pushed_opens_again_without_the_targets_tensors(self, hub, drafter, tmp_path):
        push_drafter_to_hub(drafter, REPO, token=TOKEN)
        for name, content in hub.files(REPO).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            names = set(file.keys())
        assert not {"embed_tokens.weight", "lm_head.weight"} & names
        opened = DSparkDrafter.from_pretrained(tmp_path)
        assert all(torch.equal(tensor, opened.state_dict()[name]) for name, tensor in drafter.state_dict().items())
        assert opened.config.target_model_name_or_path == TARGET

    def test_a_drafter_opened_from_a_folder_says_nothing_of_it(self, hub, drafter, tmp_path):
        drafter.save_pretrained(tmp_path / "secret_folder")
        push_drafter_to_hub(DSparkDrafter.from_pretrained(tmp_path / "secret_folder"), REPO, token=TOKEN)
        assert not any(b"secret_folder" in content for content in hub.files(REPO).values())

    def test_to_a_branch(self, hub, drafter):
        hub.add(REPO)
        push_drafter_to_hub(drafter, REPO, token=TOKEN, revision="v2")
        assert "README.md" in hub.files(REPO, "v2")
        assert "README.md" not in hub.files(REPO)

    def test_a_card_is_not_overwritten_unless_asked_to(self, hub, drafter):
        hub.add(REPO, README__md="by hand")
        with pytest.raises(FileExistsError, match=r"someone/tiny-drafter has a README.md, which would be overwritten"):
            push_drafter_to_hub(drafter, REPO, token=TOKEN)
        assert hub.writes == []
        push_drafter_to_hub(drafter, REPO, token=TOKEN, overwrite_card=True)
        assert hub.files(REPO)["README.md"] != b"by hand"

    @pytest.mark.parametrize("revision", [None, "new-branch"])
    def test_what_would_be_taken_for_a_part_of_this_drafter_goes(self, hub, drafter, revision):
        names = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "dspark_calibration.json")
        kept = {"model.safetensors": b"old weights", "notes.txt": b"by hand", "models/a.safetensors": b"other"}
        hub.add(REPO).branches["main"].append(Commit({**dict.fromkeys(names, b"old"), **kept}))
        planned = push_drafter_to_hub(drafter, REPO, token=TOKEN, dry_run=True)
        report = push_drafter_to_hub(drafter, REPO, token=TOKEN, revision=revision)
        assert planned.deleted == report.deleted == [*names]
        files = hub.files(REPO, revision or "main")
        assert sorted(files) == sorted([*FILES, "notes.txt", "models/a.safetensors"])
        assert files["model.safetensors"] != b"old weights"

    def test_a_pull_request_leaves_main_as_it_is(self, hub, drafter):
        hub.add(REPO, README__md="by hand")
        report = push_drafter_to_hub(drafter, REPO, token=TOKEN, create_pr=True)
        assert report.commit.pr_url == f"{hub.endpoint}/{REPO}/discussions/1"
        assert hub.files(REPO) == {"README.md": b"by hand"}
        assert hub.files(REPO, "refs/pr/1")["README.md"].decode() == report.card
        again = push_drafter_to_hub(
            drafter, REPO, token=TOKEN, revision="refs/pr/1", overwrite_card=True, card=ModelCard(CARD)
        )
        assert hub.files(REPO, "refs/pr/1")["README.md"].decode() == again.card
        assert hub.files(REPO) == {"README.md": b"by hand"}
        assert not any("/branch/" in request for request in hub.requests)

    def test_a_finished_card(self, hub, drafter):
        report = push_drafter_to_hub(drafter, REPO, token=TOKEN, card=ModelCard(CARD))
        assert report.card == hub.files(REPO)["README.md"].decode() == CARD
        with pytest.raises(ValueError, match="leave `license`, `results`, `training` and `tags` out"):
            push_drafter_to_hub(drafter, REPO, token=TOKEN, card=ModelCard(CARD), tags=["more"])

    def test_a_dry_run_sends_nothing(self, hub, drafter):
        report = push_drafter_to_hub(drafter, REPO, token=TOKEN, dry_run=True)
        assert sorted(report.files) == sorted(FILES)
        assert report.files["README.md"] == len(report.card.encode())
        assert report.commit is None
        assert hub.writes == []
        assert hub.requests

    def test_a_dry_run_needs_no_hub(self, drafter, monkeypatch):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert sorted(push_drafter_to_hub(drafter, REPO, token=TOKEN, dry_run=True).files) == sorted(FILES)

    def test_a_dry_run_says_what_would_stop_the_push(self, hub, drafter):
        hub.add(REPO, README__md="by hand")
        with pytest.raises(FileExistsError):
            push_drafter_to_hub(drafter, REPO, token=TOKEN, dry_run=True)


class TestLicence:
    def test_it_is_the_targets(self, hub, drafter):
        fields = {"license": "other", "license_name": "tiny", "license_link": "https://example.org/licence"}
        lines = "\n".join(f"{name}: {value}" for name, value in fields.items())
        hub.add(TARGET, README__md=f"---\n{lines}\ntags: [x]\n---\n# A target\n")
        data = ModelCard(push_drafter_to_hub(drafter, REPO, token=TOKEN).card).data.to_dict()
        assert {name: data[name] for name in fields} == fields
        assert "x" not in data["tags"]

    def test_what_is_said_comes_first(self, hub, drafter):
        hub.add(TARGET, README__md=CARD)
        report = push_drafter_to_hub(drafter, REPO, token=TOKEN, license="mit")
        assert ModelCard(report.card).data.license == "mit"

    @pytest.mark.parametrize("card", [None, "# without metadata\n", "---\nlicense: [a, b]\n---\n"])
    def test_it_is_not_made_up(self, hub, drafter, card):
        if card is not None:
            hub.add(TARGET, README__md=card)
        assert "license" not in ModelCard(push_drafter_to_hub(drafter, REPO, token=TOKEN).card).data.to_dict()


class TestRefusals:
    """Nothing has been sent when one of them is raised."""

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (None, "names no target, expected its id on the Hub"),
            ("/home/me/model", "names the target '/home/me/model'"),
        ],
    )
    def test_a_drafter_without_a_target(self, hub, target, message):
        with pytest.raises(ValueError, match=message):
            push_drafter_to_hub(kit.new_drafter(target_model_name_or_path=target), REPO, token=TOKEN)
        assert hub.requests == []

    @pytest.mark.parametrize("value", [nan, float("inf")])
    def test_weights_that_are_not_finite(self, hub, drafter, value):
        with torch.no_grad():
            drafter.fc.weight[0, 0] = value
            drafter.norm.weight[0] = value
        with pytest.raises(ValueError, match=r"hold NaN or infinite values \(fc.weight, norm.weight\)"):
            push_drafter_to_hub(drafter, REPO, token=TOKEN)
        assert hub.requests == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"repo_id": "tiny-drafter"}, "`repo_id` is 'tiny-drafter', expected `owner/name`"),
            ({"repo_id": "some one/tiny-drafter"}, "some one/tiny-drafter"),
            (
                {"create_pr": True, "revision": "v2"},
                "`create_pr` opens a pull request to `main`, but `revision` is v2",
            ),
        ],
    )
    def test_arguments(self, hub, drafter, options, message):
        with pytest.raises(ValueError, match=message):
            push_drafter_to_hub(drafter, **{"repo_id": REPO, "token": TOKEN, **options})
        assert hub.requests == []

    def test_a_public_repository_does_not_become_private(self, hub, drafter):
        hub.add(REPO)
        with pytest.raises(ValueError, match="`private` is True, but someone/tiny-drafter is there already, and pub"):
            push_drafter_to_hub(drafter, REPO, token=TOKEN, private=True)
        assert hub.writes == []
        with pytest.raises(ValueError, match="and pub"):  # nor on a branch that is not there yet
            push_drafter_to_hub(drafter, REPO, token=TOKEN, private=True, revision="new-branch")
        assert hub.writes == []
        hub.repositories[REPO].visibility = "private"
        push_drafter_to_hub(drafter, REPO, token=TOKEN, private=True)

    def test_a_card_that_a_new_branch_would_begin_with_is_not_replaced(self, hub, drafter):
        hub.add(REPO, README__md="---\n---\nMine.\n")
        with pytest.raises(FileExistsError, match="which would be overwritten"):
            push_drafter_to_hub(drafter, REPO, token=TOKEN, revision="new-branch")
        assert hub.writes == []

    def test_no_path_of_this_machine_is_published(self, hub, drafter, tmp_path):
        drafter.config.converted_from = {"speculators": {"verifier": {"name_or_path": str(tmp_path)}, "taps": [1, 2]}}
        push_drafter_to_hub(drafter, REPO, token=TOKEN)
        config = json.loads(hub.files(REPO)["config.json"])
        assert config["converted_from"] == {
            "speculators": {"verifier": {"name_or_path": tmp_path.name}, "taps": [1, 2]}
        }


class TestFaults:
    def test_somebody_pushed_in_between(self, hub, drafter):
        hub.add(REPO)
        hub.faults.append(Fault("POST .*/preupload/", 503))

        def push_meanwhile(seconds: float) -> None:
            """While the client waits for its second try."""
            hub.repositories[REPO].branches["main"].append(Commit({"README.md": b"by hand"}))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("huggingface_hub.utils._http.time.sleep", push_meanwhile)
            with pytest.raises(HubError, match=r"answered 412 \(the branch has moved\). The branch has moved since"):
                push_drafter_to_hub(drafter, REPO, token=TOKEN)
        assert hub.files(REPO) == {"README.md": b"by hand"}

    def test_a_conflict_of_two_commits(self, hub, drafter):
        hub.faults.append(Fault("POST .*/commit/", 409, body={"error": "another commit is under way"}))
        with pytest.raises(HubError, match=r"answered 409 \(another commit .* Something else") as caught:
            push_drafter_to_hub(drafter, REPO, token=TOKEN)
        assert caught.value.status == 409
        assert caught.value.repo_id == REPO

    def test_an_expired_token(self, hub, drafter):
        with pytest.raises(HubError, match=rf"answered 401 \(.*{INVALID_TOKEN}.*`hf auth login`"):
            push_drafter_to_hub(drafter, REPO, token="hf_expired")
        assert hub.writes == []

    def test_no_token(self, hub, drafter):
        with pytest.raises(HubError, match=r"answered 401 \(Invalid username or password.*`hf auth login`"):
            push_drafter_to_hub(drafter, REPO, token=False)
        assert REPO not in hub.repositories

    def test_what_the_hub_does_not_like(self, hub, drafter):
        hub.faults.append(Fault("POST .*/commit/", 400, body={"error": "unexpected file"}))
        with pytest.raises(HubError, match=r"answered 400 \(unexpected file\). Mend that"):
            push_drafter_to_hub(drafter, REPO, token=TOKEN)

    def test_a_token_that_may_not_write(self, hub, drafter):
        hub.faults.append(Fault("POST .*/repos/create", 403, times=9))
        with pytest.raises(HubError, match=r"answered 403 .*or open a pull request"):
            push_drafter_to_hub(drafter, REPO, token=TOKEN)

    @pytest.mark.parametrize("request_", ["POST .*/preupload/", "POST .*/objects/batch", "PUT /lfs/"])
    def test_a_passing_fault_of_the_server_is_tried_again(self, hub, drafter, request_):
        fault = Fault(request_, 503, times=2)
        hub.faults.append(fault)
        push_drafter_to_hub(drafter, REPO, token=TOKEN)
        assert fault.times == 0
        assert "model.safetensors" in hub.files(REPO)

    def test_a_failed_upload_commits_nothing(self, hub, drafter):
        hub.faults.append(Fault("PUT /lfs/", 500, times=99))
        with pytest.raises(HubError, match=r"answered 500 .*push again: what was uploaded is not sent twice"):
            push_drafter_to_hub(drafter, REPO, token=TOKEN)
        assert not any("/commit/" in request for request in hub.requests)

    def test_after_a_failed_commit_the_weights_are_not_sent_again(self, hub, drafter):
        hub.faults.append(Fault("POST .*/commit/", 502))
        with pytest.raises(HubError, match="answered 502"):
            push_drafter_to_hub(drafter, REPO, token=TOKEN)
        push_drafter_to_hub(drafter, REPO, token=TOKEN)
        assert "model.safetensors" in hub.files(REPO)
        assert sum(request.startswith("PUT /lfs/") for request in hub.requests) == 1

    def test_no_hub(self, drafter, monkeypatch):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(HubError, match=r"the connection failed .*Is the Hub within reach"):
            push_drafter_to_hub(drafter, REPO, token=TOKEN)


class TestToken:
    @pytest.mark.parametrize("status", [None, 401, 403, 500])
    def test_it_is_nowhere_to_be_read(self, hub, drafter, status, caplog, capfd):
        text = ""
        if status is not None:
            hub.faults.append(Fault("POST .*/(create|commit)", status, times=9))
        with caplog.at_level(logging.DEBUG):
            try:
                text = str(push_drafter_to_hub(drafter, REPO, token=TOKEN))
            except HubError as error:
                text = f"{error} {error!r} {error.found} {error.__cause__}"
        assert bool(status) == ("answered" in text)
        assert caplog.text
        assert TOKEN not in text + caplog.text + "".join(capfd.readouterr())
        assert not any(TOKEN.encode() in content for repo in hub.repositories for content in hub.files(repo).values())

    def test_one_that_the_client_quotes(self, hub, drafter):
        """A line break at its end, as from a file."""
        with pytest.raises(HubError) as caught:
            push_drafter_to_hub(drafter, REPO, token=f"{TOKEN}\n")
        assert "<token>" in str(caught.value)
        assert TOKEN not in str(caught.value)
        assert caught.value.__suppress_context__


class TestCommand:
    @pytest.fixture
    def folder(self, drafter, tmp_path) -> str:
        drafter.config.target_model_name_or_path = None
        drafter.bfloat16().save_pretrained(tmp_path / "drafter")
        return str(tmp_path / "drafter")

    def test_push(self, hub, folder, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.add(TARGET, README__md=CARD)
        options = ["--drafter", folder, "--repo-id", REPO, "--target", TARGET]
        assert main(["push", *options, "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert "custom_generate/generate.py" in out
        assert "license: apache-2.0" in out
        assert f"Dry run: nothing was sent to {REPO}." in out
        assert hub.writes == []
        assert main(["push", *options, "--private", "--json", str(tmp_path / "push.json")]) == 0
        assert hub.repositories[REPO].visibility == "private"
        written = json.loads((tmp_path / "push.json").read_text())
        assert written["commit"]["commit_url"] in capsys.readouterr().out.splitlines()
        assert [*written["files"]] == FILES
        assert json.loads(hub.files(REPO)["config.json"])["dtype"] == "bfloat16"

    def test_a_missing_licence_is_said(self, hub, folder, monkeypatch, capsys):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert main(["push", "--drafter", folder, "--repo-id", REPO, "--target", TARGET, "--dry-run"]) == 0
        assert "The card names no licence" in capsys.readouterr().out

    def test_an_error_is_one_line(self, hub, folder, monkeypatch, capsys):
        monkeypatch.setenv("HF_TOKEN", "hf_expired")
        assert main(["push", "--drafter", folder, "--repo-id", REPO, "--target", TARGET]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"dspark-hf: {REPO} was not pushed: the Hub answered 401")
        assert error.count("\n") == 1
        assert "hf_expired" not in error

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "drafter is missing"),
            (["--drafter", "d"], "repo_id is missing: owner/name of the repository"),
            (["--drafter", "d", "--repo-id", REPO, "--card", "no.md"], "--card is no.md, which is no file"),
        ],
    )
    def test_wrong_arguments(self, options, message, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["push", *options])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
