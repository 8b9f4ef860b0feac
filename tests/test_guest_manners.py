"""A guest in transformers: its arguments, its pipelines, its files and other people's wrappers are respected."""

import functools
import json
from unittest.mock import patch

import kit
import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, StoppingCriteriaList, StopStringCriteria, pipeline
from transformers.generation import GenerationMixin

from dspark_hf import DSparkConfig, DSparkDrafter, UnsupportedGenerationError, dispatch
from dspark_hf.target_taps import TargetTaps
from dspark_hf.vocabulary import DraftVocabularyMap


def generate(assistant, **kwargs):
    settings = {**kit.inputs(), "do_sample": False, "max_new_tokens": 12, **kwargs}
    return kit.target().generate(**settings, assistant_model=assistant)


class TestArguments:
    def test_the_target_sees_the_arguments_that_plain_generation_passes(self):
        seen: dict[str, set[str]] = {}

        def spy(name):
            forward = LlamaForCausalLM.forward

            @functools.wraps(forward)
            def recording(self, *args, **kwargs):
                seen.setdefault(name, set()).update(kwargs)
                return forward(self, *args, **kwargs)

            return patch.object(LlamaForCausalLM, "forward", recording)

        with spy("plain"):
            generate(None)
        with spy("drafted"):
            generate(kit.drafter())
        assert seen["drafted"] == seen["plain"]

    def test_numpy_integers_are_integers(self):
        drafter = kit.drafter()
        with drafter.trace() as trace:
            generate(drafter, num_assistant_tokens=np.int64(2))
        assert max(len(r.proposed) for r in trace.rounds) == 2

    @pytest.mark.parametrize(
        ("given", "named"), [(DSparkDrafter, "class"), (kit.drafter().config, "config")], ids=["class", "config"]
    )
    def test_a_class_or_config_in_place_of_a_drafter(self, given, named):
        with pytest.raises(TypeError, match=rf"must be a loaded drafter, .*from_pretrained.* not its {named}"):
            generate(given)

    def test_paged_caches_take_no_assistant(self):
        with pytest.raises(UnsupportedGenerationError, match="continuous batching, which takes no `assistant_model`"):
            generate(kit.drafter(), cache_implementation="paged")

    def test_token_healing_says_how_to_do_it_first(self):
        with pytest.raises(UnsupportedGenerationError, match=r"heal the prompt first with `model.heal_tokens"):
            generate(kit.drafter(), token_healing=True, tokenizer=kit.tokenizer())


class TestStopStrings:
    """Which stop strings hold is decided as plain generation decides it."""

    def lengths(self, target, **kwargs):
        settings = {**kit.inputs(), "do_sample": False, "max_new_tokens": 16, "tokenizer": kit.tokenizer(), **kwargs}
        criteria = settings.pop("criteria", tuple)
        plain = target.generate(**settings, stopping_criteria=StoppingCriteriaList(criteria()))
        drafted = target.generate(
            **settings, stopping_criteria=StoppingCriteriaList(criteria()), assistant_model=kit.drafter()
        )
        assert drafted.tolist() == plain.tolist()
        return plain.shape[1] - len(kit.PROMPT)

    def word(self, index):
        return kit.word_of(kit.continuation(kit.target())[index])

    def test_an_explicit_none_switches_those_of_the_model_off(self):
        target = kit.new_target()
        target.generation_config.stop_strings = [self.word(3)]
        assert self.lengths(target) <= 4
        assert self.lengths(target, stop_strings=None) == 16

    def test_the_users_own_criterion_replaces_the_built_one(self):
        own = functools.partial(StopStringCriteria, kit.tokenizer(), [self.word(7)])
        assert self.lengths(kit.new_target(), stop_strings=[self.word(2)], criteria=lambda: [own()]) > 3

    def test_a_generation_config_is_not_changed(self):
        config = GenerationConfig(stop_strings=[self.word(3)], max_new_tokens=16, do_sample=False)
        before = config.to_dict()
        kit.new_target().generate(
            **kit.inputs(), generation_config=config, tokenizer=kit.tokenizer(), assistant_model=kit.drafter()
        )
        assert config.to_dict() == before


class TestPipeline:
    def test_a_text_generation_pipeline_takes_a_drafter(self):
        target = kit.new_target()
        tokens = {name: getattr(target.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        drafter = kit.new_drafter(**tokens)
        # A list of words is one the tokenizer cuts as they are.
        prompt = "".join(kit.word_of(token) for token in kit.PROMPT)
        settings = {"model": target, "tokenizer": kit.tokenizer()}
        config = GenerationConfig(max_new_tokens=8, do_sample=False)
        plain = pipeline("text-generation", **settings)(prompt, generation_config=config)
        with drafter.trace() as trace:
            ours = pipeline("text-generation", **settings, assistant_model=drafter)(prompt, generation_config=config)
        assert ours == plain
        assert trace.rounds


class TestHook:
    def test_somebody_elses_wrapper_survives_uninstall(self):
        ours = GenerationMixin.generate

        @functools.wraps(ours)
        def theirs(self, *args, **kwargs):
            return ours(self, *args, **kwargs)

        with patch.object(GenerationMixin, "generate", theirs):
            dispatch.uninstall()
            assert GenerationMixin.generate is theirs
        assert GenerationMixin.generate is ours

    def test_nested_traces_all_record(self):
        drafter = kit.drafter()
        with drafter.trace() as outer:
            generate(drafter)
            with drafter.trace() as inner:
                generate(drafter)
        assert len(outer.rounds) > len(inner.rounds) > 0
        assert outer.num_new_tokens == 24
        assert inner.num_new_tokens == 12

    def test_an_interrupted_call_is_still_in_the_trace(self):
        def interrupt(input_ids, scores):
            if input_ids.shape[1] > len(kit.PROMPT) + 4:
                raise KeyboardInterrupt
            return scores

        drafter = kit.drafter()
        with drafter.trace() as trace, pytest.raises(KeyboardInterrupt):
            generate(drafter, logits_processor=[interrupt])
        assert trace.summary().tokens_per_second > 0

    def test_the_map_of_two_tokenizers_is_built_once(self):
        drafter = kit.drafter(own_embed_tokens=True, own_lm_head=True)
        with patch.object(
            DraftVocabularyMap, "from_tokenizers", wraps=DraftVocabularyMap.from_tokenizers
        ) as from_tokenizers:
            for _ in range(2):
                generate(drafter, tokenizer=kit.tokenizer(), assistant_tokenizer=kit.tokenizer())
        assert from_tokenizers.call_count <= 1


class TestTargets:
    def test_a_hook_that_another_call_is_taking_off_does_no_harm(self):
        # torch forgets the hook's keyword arguments first; a pass in that moment belongs to somebody else.
        target = kit.new_target()
        taps = TargetTaps(target, [-1, 0])
        target.model.layers[0]._forward_pre_hooks_with_kwargs.clear()
        plain = target.generate(**kit.inputs(), max_new_tokens=4, do_sample=False)
        taps.close()
        assert plain.tolist() == kit.target().generate(**kit.inputs(), max_new_tokens=4, do_sample=False).tolist()

    def test_layers_with_more_than_one_state_are_refused(self):
        target = kit.new_target()
        layer = target.model.layers[0]
        forward = layer.forward
        layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)[None]
        with pytest.raises(UnsupportedGenerationError, match=r"gives a tensor of shape \[1, 1, 10, 32\]"):
            target.generate(**kit.inputs(), max_new_tokens=3, assistant_model=kit.drafter())


class TestFiles:
    def test_config_fields_and_folders_as_arguments(self, tmp_path):
        kit.new_drafter().save_pretrained(tmp_path)
        changed = DSparkDrafter.from_pretrained(tmp_path, attention_dropout=0.3, code_revision="main")
        assert changed.config.attention_dropout == 0.3
        again = DSparkDrafter.from_pretrained(tmp_path, config=str(tmp_path))
        assert again.config.to_dict() == DSparkDrafter.from_pretrained(tmp_path).config.to_dict()

    def test_the_attention_implementation_survives_an_override(self, tmp_path):
        kit.new_drafter().save_pretrained(tmp_path)
        config = DSparkConfig.from_pretrained(tmp_path, attn_implementation="eager")
        drafter = DSparkDrafter.from_pretrained(tmp_path, config=config, block_size=3)
        assert (drafter.config._attn_implementation, drafter.config.block_size) == ("eager", 3)
        assert config.block_size == kit.BLOCK

    def test_a_config_in_a_folder_of_its_own(self, tmp_path):
        kit.new_drafter().save_pretrained(tmp_path / "drafter")
        config = DSparkConfig.from_pretrained(tmp_path / "drafter")
        config.block_size = 2
        config.save_pretrained(tmp_path / "config")
        drafter = DSparkDrafter.from_pretrained(tmp_path / "drafter", config=tmp_path / "config")
        assert drafter.config.block_size == 2

    @pytest.mark.parametrize("shard_size", ["5GB", "10KB"], ids=["one file", "shards"])
    def test_a_variant_round_trip(self, shard_size, tmp_path):
        drafter = kit.new_drafter()
        drafter.save_pretrained(tmp_path, variant="fp16", max_shard_size=shard_size)
        again = DSparkDrafter.from_pretrained(tmp_path, variant="fp16")
        assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))

    def test_broken_settings_name_their_file(self, tmp_path):
        kit.new_drafter().save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
        with pytest.raises(OSError, match=r"generation_config.json is not a valid JSON file .* it is optional"):
            DSparkDrafter.from_pretrained(tmp_path)

    def test_no_folder_at_all(self):
        with pytest.raises(ValueError, match="needs a folder or repository"):
            DSparkDrafter.from_pretrained(None)

    def test_sampling_settings_of_a_foreign_checkpoint_are_not_the_drafters(self, tmp_path):
        kit.new_drafter().save_pretrained(tmp_path)
        settings = {"temperature": 0.6, "do_sample": False, "num_assistant_tokens": 3}
        (tmp_path / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
        drafter = DSparkDrafter.from_pretrained(tmp_path)
        assert drafter.generation_config.num_assistant_tokens == 3
        assert drafter.generation_config.temperature is None
        drafter.save_pretrained(tmp_path / "again")

    def test_push_to_hub_sends_the_settings_as_well(self, tmp_path):
        drafter = kit.new_drafter()
        drafter.generation_config.num_assistant_tokens = 2
        sent: dict = {}

        def push(self, repo_id, **options):
            sent.update(repo_id=repo_id, **options)

        with patch.object(DSparkDrafter, "push_to_hub", push):
            drafter.save_pretrained(tmp_path / "mine", push_to_hub=True, private=True)
        assert sent == {"repo_id": "mine", "private": True}
        assert json.loads((tmp_path / "mine" / "generation_config.json").read_text())["num_assistant_tokens"] == 2

    def test_other_processes_write_nothing(self, tmp_path):
        with patch.object(DSparkDrafter, "push_to_hub") as push:
            kit.new_drafter().save_pretrained(tmp_path, False, push_to_hub=True)
        assert not (tmp_path / "generation_config.json").exists()
        assert not push.called

    def test_a_drafter_survives_a_round_trip_in_another_dtype(self, tmp_path):
        drafter = kit.new_drafter().to(torch.bfloat16)
        drafter.save_pretrained(tmp_path)
        again = DSparkDrafter.from_pretrained(tmp_path)
        assert again.dtype == torch.bfloat16
        assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))
