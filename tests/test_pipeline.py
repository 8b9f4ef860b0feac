"""`DSparkPipeline`: what `transformers.pipeline` returns, from a target with its drafter."""

import copy
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import kit
import pytest
import torch
from transformers import PreTrainedTokenizerFast, pipeline

from dspark_hf import DSparkDrafter, DSparkPipeline, UnsupportedCheckpointError
from dspark_hf.comparison import Verdict
from dspark_hf.pipeline import LosslessReport

TEXTS = ["fqdch", "abcdefghijk", "bo"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
GREEDY = {"do_sample": False, "max_new_tokens": 12}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}z{% endif %}"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(kit.tokenizer())
    tokenizer.add_special_tokens({"pad_token": kit.word_of(kit.MASK)})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def pipe(tokenizer) -> DSparkPipeline:
    return DSparkPipeline(kit.target(), kit.drafter(), tokenizer)


@pytest.fixture(scope="module")
def plain(tokenizer):
    return pipeline("text-generation", model=kit.target(), tokenizer=tokenizer, device="cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("models")
    kit.target().save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    kit.drafter().save_pretrained(folder / "drafter")
    return str(folder / "target"), str(folder / "drafter")


class TestResults:
    @pytest.mark.parametrize("inputs", [TEXTS[0], TEXTS, CHATS[0], CHATS])
    @pytest.mark.parametrize(
        "options", [{}, {"return_full_text": False}, {"batch_size": 2}, {"batch_size": 3, "return_tensors": True}]
    )
    def test_are_those_of_transformers(self, pipe, plain, inputs, options):
        with pipe.drafter.trace() as trace:
            results = pipe(inputs, **GREEDY, **options)
        assert results == plain(inputs, **GREEDY, **options)
        assert trace.summary().num_rounds > 0

    def test_of_a_generator(self, pipe, plain):
        assert list(pipe((text for text in TEXTS), **GREEDY)) == list(plain((text for text in TEXTS), **GREEDY))

    def test_settings_of_every_call(self, tokenizer, plain):
        pipe = DSparkPipeline(kit.target(), kit.drafter(), tokenizer, batch_size=3, **GREEDY)
        assert pipe(TEXTS) == plain(TEXTS, **GREEDY, batch_size=3)

    def test_settings_of_the_drafter(self, tokenizer):
        """Given once or in a call; what nobody gives is the drafter's own."""
        pipe = DSparkPipeline(kit.target(), kit.drafter(), tokenizer, num_assistant_tokens=2)
        for options, most in (({}, 2), ({"num_assistant_tokens": 3}, 3)):
            with pipe.drafter.trace() as trace:
                pipe(TEXTS[0], **GREEDY, **options)
            assert max(len(one.proposed) for one in trace.rounds) == most

    def test_a_default_that_is_given_counts(self, tokenizer):
        pipe = DSparkPipeline(kit.target(), kit.drafter(), tokenizer, num_assistant_tokens_schedule="constant")
        with pipe.drafter.trace() as trace:
            pipe(TEXTS[0], **GREEDY)
        assert {one.reason for one in trace.rounds} == {"constant"}

    @pytest.mark.parametrize("given", [{}, {"num_assistant_tokens": 2}])
    def test_of_transformers_own_pipeline(self, tokenizer, plain, given):
        """Before 5.24 it fills in defaults that no drafter could follow (20 tokens)."""
        drafter = kit.drafter()
        theirs = pipeline("text-generation", model=kit.target(), tokenizer=tokenizer, assistant_model=drafter, **given)
        with drafter.trace() as trace:
            assert theirs(TEXTS[0], **GREEDY) == plain(TEXTS[0], **GREEDY)
        assert trace.summary().num_rounds > 0
        assert {len(one.proposed) for one in trace.rounds} <= set(range(1 + given.get("num_assistant_tokens", 7)))

    def test_a_sample_is_drafted_too(self, pipe):
        torch.manual_seed(0)
        with pipe.drafter.trace() as trace:
            (result,) = pipe(TEXTS[0], max_new_tokens=8)
        assert result["generated_text"].startswith(TEXTS[0])
        assert trace.summary().num_rounds > 0

    def test_stop_strings(self, pipe, plain):
        stop = plain(TEXTS[0], **GREEDY, return_full_text=False)[0]["generated_text"][3:6]
        options = {**GREEDY, "stop_strings": [stop], "return_full_text": False}
        assert pipe(TEXTS[0], **options, tokenizer=pipe.tokenizer)[0]["generated_text"].endswith(stop)


class TestOpening:
    def test_by_names(self, folders, plain):
        pipe = DSparkPipeline(*folders, device="cpu")
        assert isinstance(pipe.drafter, DSparkDrafter)
        assert pipe(TEXTS, **GREEDY) == plain(TEXTS, **GREEDY)

    def test_by_paths(self, folders, plain):
        pipe = DSparkPipeline(*map(Path, folders), Path(folders[0]), device="cpu")
        assert pipe(TEXTS[0], **GREEDY) == plain(TEXTS[0], **GREEDY)

    def test_a_drafter_by_name_follows_its_target(self, folders):
        pipe = DSparkPipeline(folders[0], folders[1], dtype=torch.bfloat16, device="cpu")
        assert pipe.model.dtype == pipe.drafter.dtype == torch.bfloat16

    def test_the_tokenizer_beside_the_target(self, folders):
        target = kit.new_target()
        target.config._name_or_path = target.name_or_path = folders[0]
        assert DSparkPipeline(target, kit.drafter()).tokenizer.get_vocab() == kit.tokenizer().get_vocab()

    def test_no_tokenizer_at_all(self):
        target = kit.new_target()
        target.config._name_or_path = target.name_or_path = ""
        with pytest.raises(ValueError, match="`tokenizer` is missing"):
            DSparkPipeline(target, kit.drafter())

    def test_a_target_in_the_drafters_place(self, folders):
        with pytest.raises(UnsupportedCheckpointError, match="an ordinary language model"):
            DSparkPipeline(folders[0], folders[0])

    def test_the_target_stays_where_it_is(self, tokenizer):
        with patch.object(torch.nn.Module, "to") as moved:
            DSparkPipeline(kit.target(), kit.drafter(), tokenizer)
        moved.assert_not_called()

    def test_a_drafter_with_another_order_of_the_same_tokens(self, tokenizer, pipe):
        """As `generate(tokenizer=..., assistant_tokenizer=...)`."""
        other = DSparkPipeline(kit.target(), kit.drafter(), tokenizer, assistant_tokenizer=copy.deepcopy(tokenizer))
        assert other(TEXTS[0], **GREEDY) == pipe(TEXTS[0], **GREEDY)


class TestStream:
    @pytest.mark.parametrize("prompt", [TEXTS[1], CHATS[1]])
    def test_gives_the_new_text_in_pieces(self, pipe, plain, prompt):
        pieces = list(pipe.stream(prompt, **GREEDY))
        (expected,) = plain(prompt, **GREEDY, return_full_text=False)
        assert "".join(pieces) == expected["generated_text"]
        assert all(pieces)

    def test_is_recorded_by_the_callers_trace(self, pipe):
        with pipe.drafter.trace() as trace:
            list(pipe.stream(TEXTS[0], **GREEDY))
        assert trace.summary().num_new_tokens == GREEDY["max_new_tokens"]

    @pytest.mark.parametrize("prompts", [TEXTS, CHATS, []])
    def test_of_several_prompts(self, pipe, prompts):
        with pytest.raises(ValueError, match="takes one prompt"):
            pipe.stream(prompts)

    def test_errors_come_from_the_iterator(self, pipe):
        with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
            list(pipe.stream(TEXTS[0], num_beams=2))

    def test_ends_when_nobody_reads(self, pipe, plain):
        others = {*threading.enumerate()}
        with pipe.drafter.trace() as trace:
            stream = pipe.stream(TEXTS[0], do_sample=False, max_new_tokens=400)
            next(stream)
            stream.close()
        assert {*threading.enumerate()} <= others
        assert sum(one.num_new_tokens for one in trace.rounds) < 400
        assert pipe(TEXTS[0], **GREEDY) == plain(TEXTS[0], **GREEDY)


class TestVerifyLossless:
    @pytest.mark.parametrize("prompts", [TEXTS[0], TEXTS, CHATS[0], CHATS])
    def test_equal_texts(self, pipe, prompts):
        with pipe.drafter.trace() as trace:
            report = pipe.verify_lossless(prompts, max_new_tokens=12)
        num_prompts = 1 if prompts in (TEXTS[0], CHATS[0]) else 3
        assert trace.summary().num_new_tokens == 12 * num_prompts
        assert (len(report.verdicts), report.equal, report.lossless) == (num_prompts, True, True)
        assert report.first_difference is None
        assert str(report) == f"{num_prompts} of {num_prompts} texts are identical"

    def test_a_text_that_differs(self, pipe):
        """As if the drafted text had been another one from its third token on."""
        real, seen = DSparkPipeline.forward, []

        def forward(self, inputs, **parameters):
            outputs = real(self, inputs, **parameters)
            seen.append("assistant_model" in parameters)
            if seen[-1]:
                tokens = outputs["generated_sequence"][0, 0]
                tokens[-3] = (tokens[-3] + 1) % kit.VOCAB
            return outputs

        with patch.object(DSparkPipeline, "forward", forward):
            report = pipe.verify_lossless(TEXTS, max_new_tokens=5)
        assert seen == [False, True] * 3
        assert not report.equal
        assert not report.lossless
        index, verdict = report.first_difference
        assert (index, verdict.position) == (0, 2)
        assert verdict.margin > verdict.rounding > 0
        assert "BEYOND ROUNDING" in str(report)

    def test_a_difference_within_rounding(self):
        report = LosslessReport([Verdict(), Verdict(3, margin=0.1, rounding=0.2, dtype="bfloat16")])
        assert (report.equal, report.lossless) == (False, True)
        assert report.first_difference == (1, report.verdicts[1])
        assert "1 of 2 texts are identical\nprompt 1: differs from token 4" in str(report)

    @pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 2}, {"repetition_penalty": 1.2}])
    def test_refuses_what_is_not_greedy(self, pipe, options):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` is"):
            pipe.verify_lossless(TEXTS, **options)

    @pytest.mark.parametrize(
        "options",
        [
            {"draft_invariant": True},
            {"prompt_lookup_num_tokens": 4},
            {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "constant"},
        ],
    )
    def test_the_plain_side_gets_nothing_of_drafting(self, pipe, options):
        plain, real = [], DSparkPipeline.forward

        def forward(self, inputs, **parameters):
            if "assistant_model" not in parameters:
                plain.append(parameters)
            return real(self, inputs, **parameters)

        with patch.object(DSparkPipeline, "forward", forward):
            assert pipe.verify_lossless(TEXTS[0], max_new_tokens=8, **options).equal
        assert plain[0].keys().isdisjoint(options)

    def test_settings_of_every_call_do_not_make_it_sample(self, tokenizer):
        pipe = DSparkPipeline(kit.target(), kit.drafter(), tokenizer, do_sample=True, temperature=2.0)
        assert pipe.verify_lossless(TEXTS, max_new_tokens=8).equal


def test_importing_the_package_does_not_import_the_pipeline():
    code = "import sys, dspark_hf; print([m for m in ('pipeline', 'comparison') if f'dspark_hf.{m}' in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
