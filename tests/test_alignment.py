"""Each way in which a pair does not fit, on the text of its message; and pairs that fit, in silence."""

import timeit
import warnings
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    Gemma3Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
)

from dspark_hf.alignment import MUST_NOT_RUN, WILL_RUN_BADLY, check_alignment, check_pair
from dspark_hf.configuration_dspark import DSparkConfig
from dspark_hf.errors import AlignmentError
from dspark_hf.vocabulary import DraftVocabularyMap

WORDS = ["<unk>", "<s>", "</s>", "<pad>", "the", "cat", "sat", "on", "a", "mat"]
TEXTS = ["the cat sat on a mat", "a dog sat"]
OWN = {"own_embed_tokens": True, "own_lm_head": True}


def target_config(**kwargs) -> Qwen3Config:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64}
    name = kwargs.pop("name", "")
    config = Qwen3Config(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, **kwargs})
    config.name_or_path = name
    return config


def drafter(**kwargs) -> SimpleNamespace:
    """Stands for a `DSparkDrafter`: what the checks read of one is its config."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "markov_rank": 4}
    taps = {"target_layer_ids": [0, 2], "mask_token_id": 96}
    return SimpleNamespace(config=DSparkConfig(**{**sizes, **taps, **kwargs}))


def word_tokenizer(words=WORDS, bos_before_text=False, **kwargs) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos_before_text:
        bos = ("<s>", words.index("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**special, **kwargs})


def tokenizer_report(target_tokenizer, drafter_tokenizer, texts=TEXTS, pair_drafter=None, **kwargs):
    return check_alignment(
        target_config(),
        pair_drafter or drafter(**OWN),
        target_tokenizer,
        drafter_tokenizer,
        texts,
        raise_error=False,
        **kwargs,
    )


def only(report, verdict) -> str:
    """The text of the report's only finding, which has this verdict."""
    assert [finding.verdict for finding in report.findings] == [verdict], str(report)
    assert report.ok == (verdict == WILL_RUN_BADLY)
    return str(report)


# Pairs that fit


@pytest.mark.parametrize("own", [{}, OWN])
def test_fitting_pair(own):
    report = check_pair(target_config(), drafter(**own))
    assert report.ok
    assert report.findings == report.warnings == report.blockers == []
    assert str(report) == "The drafter fits the target."
    report.raise_if_blocked()


def test_fitting_pair_with_tokenizers_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check_alignment(target_config(), drafter(), word_tokenizer(), word_tokenizer(), TEXTS)
    assert report.findings == []


def test_built_in_samples_are_used():
    assert tokenizer_report(word_tokenizer(), word_tokenizer(), texts=None).findings == []


def test_models_and_configs_are_both_taken():
    model = Qwen3ForCausalLM(target_config())
    assert check_pair(model, drafter()).findings == []
    assert check_pair(model.config, drafter().config).findings == []


def test_other_families():
    llama = LlamaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
    assert check_pair(llama, drafter()).findings == []
    assert not check_pair(llama, drafter(target_hidden_size=64, **OWN)).ok


def test_the_text_part_of_a_multimodal_target_counts():
    text = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}
    target = Gemma3Config(text_config=text)
    assert check_pair(target, drafter()).findings == []
    target.text_config.hidden_size = 48
    assert "hidden_size is 48 in the target and 32" in only(check_pair(target, drafter()), MUST_NOT_RUN)


def test_check_pair_is_cheap():
    target, pair_drafter = target_config(name="Qwen/Qwen3-4B"), drafter(target_model_name_or_path="Qwen/Qwen3-4B")
    assert min(timeit.repeat(lambda: check_pair(target, pair_drafter), number=10, repeat=5)) / 10 < 2e-3


def test_checked_without_a_drafter():
    with pytest.raises(
        TypeError, match=r"must be a DSpark drafter or its config, got Qwen3Config.*target comes first"
    ):
        check_pair(drafter(), target_config())


# Configs: must not run


def test_encoder_decoder_target():
    text = only(check_pair(T5Config(), drafter()), MUST_NOT_RUN)
    assert text == (
        "must not run: the architecture is encoder-decoder in the target and decoder-only in the drafter. "
        "DSpark drafts for decoder-only models: run this target without an assistant."
    )


def test_hidden_size():
    text = only(check_pair(target_config(), drafter(target_hidden_size=48, **OWN)), MUST_NOT_RUN)
    assert "hidden_size is 32 in the target and 48 in the drafter. Use the drafter of this model." in text


def test_number_of_layers():
    text = only(check_pair(target_config(), drafter(num_target_layers=5)), MUST_NOT_RUN)
    assert "the number of decoder layers is 4 in the target and 5 in the drafter. Use the drafter" in text
    assert check_pair(target_config(), drafter(num_target_layers=4)).ok


def test_last_layer_cannot_be_tapped():
    text = only(check_pair(target_config(), drafter(target_layer_ids=[1, 3])), MUST_NOT_RUN)
    assert "the last layer that can be tapped is 2 in the target and 3 (`target_layer_ids` [1, 3]) in the" in text
    assert "Of 4 decoder layers the last one's output is final-normed" in text
    assert check_pair(target_config(), drafter(target_layer_ids=[1, 2])).ok


def test_another_vocabulary():
    target, other = target_config(vocab_size=151936), drafter(vocab_size=32000, **OWN)
    text = only(check_pair(target, other), MUST_NOT_RUN)
    assert "vocab_size is 151936 in the target and 32000 in the drafter." in text
    assert "pass `tokenizer=` and `assistant_tokenizer=` to `generate`" in text
    assert "`DraftVocabularyMap`" in text
    assert "otherwise use the drafter of this model" in text


@pytest.mark.parametrize("own", [{}, {"own_embed_tokens": True}])
def test_another_vocabulary_cannot_be_translated_for_a_borrowed_head(own):
    text = only(check_pair(target_config(vocab_size=151936), drafter(vocab_size=32000, **own)), MUST_NOT_RUN)
    assert text.endswith("in the drafter. Use the drafter of this model.")


def test_borrowed_embedding_without_a_row_for_the_mask():
    padded = {"vocab_size": 100, "mask_token_id": 97}
    text = only(check_pair(target_config(), drafter(**padded)), MUST_NOT_RUN)
    assert "row of the mask token is missing among 97 in the target and 97 (`mask_token_id`) in the drafter." in text
    assert "borrows the target's embedding, which has no row for its mask" in text
    assert check_pair(target_config(), drafter(**padded, own_embed_tokens=True)).ok


# Configs: sizes within padding, and beyond it


@pytest.mark.parametrize("sizes", [(151936, 152064), (32000, 32001), (32064, 32000), (97, 104), (104, 97)])
@pytest.mark.parametrize("own", [{}, OWN])
def test_padding_is_no_finding(sizes, own):
    target_size, drafter_size = sizes
    assert check_pair(target_config(vocab_size=target_size), drafter(vocab_size=drafter_size, **own)).findings == []


@pytest.mark.parametrize("sizes", [(32000, 34000), (34000, 32000)])
def test_more_than_padding(sizes):
    target_size, drafter_size = sizes
    report = check_pair(target_config(vocab_size=target_size), drafter(vocab_size=drafter_size, **OWN))
    text = only(report, WILL_RUN_BADLY)
    assert f"vocab_size is {target_size} in the target and {drafter_size} in the drafter." in text
    assert "more than padding: 2000 ids are never drafted" in text


def test_reduced_draft_vocabulary_is_no_finding():
    assert check_pair(target_config(), drafter(draft_vocab_size=20, own_lm_head=True)).findings == []


# Configs: names


def test_base_against_instruct():
    pair_drafter = drafter(target_model_name_or_path="org/Model-4B-Instruct")
    text = only(check_pair(target_config(name="org/Model-4B"), pair_drafter), WILL_RUN_BADLY)
    assert "the name of the target is org/Model-4B in the target and org/Model-4B-Instruct in the drafter." in text
    assert "base and instruct differ" in text


@pytest.mark.parametrize(
    ("target_name", "trained_with"),
    [
        ("Org/Model-4B", "mirror/model-4b"),
        ("org/Model-4B-AWQ", "org/Model-4B"),
        ("org/Model-4B-bnb-4bit", "org/Model-4B"),
        ("org/Model-4B-GPTQ-Int4", "org/Model-4B-FP8"),
        ("/data/model", "org/Model-4B"),
        ("./target", "org/Model-4B"),
        ("org/Model-4B", "./target"),
        ("model", "org/Model-4B"),
        ("", "org/Model-4B"),
        ("org/Model-4B", None),
    ],
)
def test_names_that_are_not_compared_or_agree(target_name, trained_with):
    pair_drafter = drafter(target_model_name_or_path=trained_with)
    assert check_pair(target_config(name=target_name), pair_drafter).findings == []


def test_a_folder_that_looks_like_a_hub_name_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "last").mkdir(parents=True)
    pair_drafter = drafter(target_model_name_or_path="org/Model-4B")
    assert check_pair(target_config(name="runs/last"), pair_drafter).findings == []
    assert check_pair(target_config(name="runs/first"), pair_drafter).findings != []


# Tokenizers: must not run


def test_permuted_tokens_name_the_map():
    permuted = [*WORDS[:4], *WORDS[:3:-1]]
    text = only(tokenizer_report(word_tokenizer(), word_tokenizer(permuted)), MUST_NOT_RUN)
    assert (
        "the numbering of 6 ordinary tokens is 'the' 4, 'cat' 5, 'sat' 6, ... in the target and "
        "'the' 9, 'cat' 8, 'sat' 7, ... in the drafter." in text
    )
    assert "pass `tokenizer=` and `assistant_tokenizer=` to `generate`" in text
    assert "`DraftVocabularyMap`" in text


def test_permuted_tokens_with_a_borrowed_head():
    permuted = [*WORDS[:4], *WORDS[:3:-1]]
    report = tokenizer_report(word_tokenizer(), word_tokenizer(permuted), pair_drafter=drafter())
    text = only(report, MUST_NOT_RUN)
    assert "borrows the target's head" in text
    assert "use the drafter of this model" in text
    assert "DraftVocabularyMap" not in text


def test_ids_of_special_tokens():
    swapped = ["<unk>", "</s>", "<s>", *WORDS[3:]]
    text = only(tokenizer_report(word_tokenizer(), word_tokenizer(swapped)), MUST_NOT_RUN)
    assert (
        "the numbering of 2 special tokens is '<s>' 1, '</s>' 2 in the target and '<s>' 2, '</s>' 1 in the drafter."
        in text
    )


def test_id_of_an_additional_special_token():
    tokenizers = word_tokenizer(), word_tokenizer()
    tokenizers[0].add_special_tokens({"additional_special_tokens": ["<call>", "<end>"]})
    tokenizers[1].add_special_tokens({"additional_special_tokens": ["<end>"]})
    report = tokenizer_report(*tokenizers)
    assert "the numbering of 1 special token is '<end>' 11 in the target and '<end>' 10 in the" in str(report)
    assert not report.ok


def test_other_split_of_text():
    letters = [*WORDS[:4], *"catsonmhe"]
    target_tokenizer, drafter_tokenizer = word_tokenizer(), word_tokenizer(list(dict.fromkeys(letters)))
    report = tokenizer_report(target_tokenizer, drafter_tokenizer)
    assert "the split of 'the cat sat on a mat' into tokens is ['the', 'cat'," in str(report.blockers[0])
    assert "The tokenizers split text differently" in str(report.blockers[0])
    numbering = [finding for finding in report.blockers if "numbering" in finding.field]
    assert [finding.remedy for finding in numbering] == ["Use the drafter of this model."]


# Tokenizers: will run badly


def test_added_tokens():
    target_tokenizer = word_tokenizer()
    target_tokenizer.add_tokens(["<x>", "<y>"])
    text = only(tokenizer_report(target_tokenizer, word_tokenizer()), WILL_RUN_BADLY)
    assert (
        "the token set is 12 tokens, 2 of its own ('<x>' 10, '<y>' 11) in the target and 10 tokens, 0 of its own in "
        "the drafter." in text
    )


def test_other_end_token():
    text = only(tokenizer_report(word_tokenizer(), word_tokenizer(eos_token="<pad>")), WILL_RUN_BADLY)
    assert "eos_token is '</s>' in the target and '<pad>' in the drafter." in text
    assert "the base model" in text


@pytest.mark.parametrize("role", ["bos_token", "unk_token"])
def test_missing_roles(role):
    text = only(tokenizer_report(word_tokenizer(), word_tokenizer(**{role: None})), WILL_RUN_BADLY)
    assert f"{role} is '{'<s>' if role == 'bos_token' else '<unk>'}' in the target and None in the drafter." in text


def test_the_pad_token_is_free():
    assert tokenizer_report(word_tokenizer(pad_token="</s>"), word_tokenizer()).findings == []


def test_tokens_around_a_text():
    text = only(tokenizer_report(word_tokenizer(bos_before_text=True), word_tokenizer()), WILL_RUN_BADLY)
    assert "what the tokenizer puts around a text is ['<s>'] in the target and [] in the drafter." in text


def test_chat_templates():
    target_tokenizer, drafter_tokenizer = word_tokenizer(), word_tokenizer()
    target_tokenizer.chat_template = "{% for m in messages %}<a>{{ m }}{% endfor %}"
    drafter_tokenizer.chat_template = "{% for m in messages %}<b>{{ m }}{% endfor %}"
    text = only(tokenizer_report(target_tokenizer, drafter_tokenizer), WILL_RUN_BADLY)
    assert "the chat template is 'a>{{ m }}{% endfor %}' at character 24 in the target and 'b>{{ m }}" in text
    assert "thinking on or off" in text
    drafter_tokenizer.chat_template = None
    text = only(tokenizer_report(target_tokenizer, drafter_tokenizer), WILL_RUN_BADLY)
    assert "the chat template is '{% for m in messages %}<a>{{ m }}{% endf' at character 0" in text
    assert "and None in the drafter" in text


@pytest.mark.parametrize("drafter_tokenizer", [None, word_tokenizer()])
def test_mask_token_in_ordinary_text(drafter_tokenizer):
    pair_drafter = drafter(mask_token_id=WORDS.index("sat"))
    report = tokenizer_report(word_tokenizer(), drafter_tokenizer, pair_drafter=pair_drafter)
    text = only(report, WILL_RUN_BADLY)
    assert "token id 6 ('sat') is ordinary text ('the cat sat on a mat'...) in the target and the mask token" in text
    assert "check `mask_token_id`" in text


def test_target_tokens_beyond_the_drafter():
    pair_drafter = drafter(vocab_size=96, mask_token_id=95)
    tokenizer = word_tokenizer([*WORDS, *(f"w{i}" for i in range(87))])
    text = only(tokenizer_report(tokenizer, None, pair_drafter=pair_drafter), WILL_RUN_BADLY)
    assert "the largest token id is 96 in the target and 95 in the drafter." in text
    assert "have no draft" in text


def test_drafter_tokenizer_alone():
    with pytest.raises(ValueError, match="`drafter_tokenizer` needs a `target_tokenizer`"):
        check_alignment(target_config(), drafter(), drafter_tokenizer=word_tokenizer())


# With a vocabulary map


def vocabulary_map(target_size=97, drafter_size=97, words=(*WORDS[:4], *WORDS[:3:-1])) -> DraftVocabularyMap:
    return DraftVocabularyMap.from_tokenizers(
        word_tokenizer(),
        word_tokenizer(list(words)),
        target_vocab_size=target_size,
        drafter_vocab_size=drafter_size,
        texts=TEXTS,
    )


def test_a_map_lets_permuted_tokens_run():
    report = tokenizer_report(
        word_tokenizer(), word_tokenizer([*WORDS[:4], *WORDS[:3:-1]]), vocabulary_map=vocabulary_map()
    )
    assert report.findings == []


def test_a_map_lets_sizes_differ():
    target, pair_drafter = target_config(vocab_size=500), drafter(**OWN)
    assert not check_pair(target, pair_drafter).ok
    assert check_pair(target, pair_drafter, vocabulary_map=vocabulary_map(500)).findings == []


def test_a_map_of_another_pair():
    text = only(check_pair(target_config(), drafter(**OWN), vocabulary_map=vocabulary_map(500)), MUST_NOT_RUN)
    assert "vocab_size is 97 (500 in the vocabulary map) in the target and 97 (97 in the vocabulary map)" in text
    assert "Build the `DraftVocabularyMap` anew" in text


def test_a_map_cannot_move_ids_of_a_borrowed_head():
    pair_drafter = drafter(own_embed_tokens=True)
    text = only(check_pair(target_config(), pair_drafter, vocabulary_map=vocabulary_map()), MUST_NOT_RUN)
    assert "the numbering of 6 tokens" in text
    assert "a drafter with its own head" in text
    assert check_pair(target_config(), pair_drafter, vocabulary_map=vocabulary_map(words=WORDS)).ok


@pytest.mark.parametrize("mask", [WORDS.index("mat"), 60])
def test_a_map_serves_a_borrowed_embedding(mask):
    pair_drafter = drafter(own_lm_head=True, mask_token_id=mask)
    assert check_pair(target_config(), pair_drafter, vocabulary_map=vocabulary_map()).findings == []


@pytest.mark.parametrize(("words", "mask"), [((*WORDS[:4], "<mask>", *WORDS[4:]), 4), (WORDS, 97)])
def test_a_map_without_a_row_for_the_mask(words, mask):
    pair_drafter = drafter(own_lm_head=True, vocab_size=98, mask_token_id=mask)
    moved = vocabulary_map(drafter_size=98, words=words)
    text = only(check_pair(target_config(), pair_drafter, vocabulary_map=moved), MUST_NOT_RUN)
    assert f"row of the mask token is missing among 97 in the target and {mask} (`mask_token_id`)" in text


# Reports, errors, warnings


def test_check_alignment_raises_the_first_blocker():
    with pytest.raises(AlignmentError, match="hidden_size is 32 in the target and 48 in the drafter") as error:
        check_alignment(target_config(), drafter(target_hidden_size=48, num_target_layers=9, **OWN))
    assert (error.value.field, error.value.target_value, error.value.drafter_value) == ("hidden_size", 32, 48)
    assert error.value.remedy == "Use the drafter of this model."
    assert isinstance(error.value, ValueError)


def test_check_alignment_warns_at_the_caller():
    pair_drafter = drafter(target_model_name_or_path="org/other")
    with pytest.warns(UserWarning, match="will run badly: the name of the target is org/this") as record:
        report = check_alignment(target_config(name="org/this"), pair_drafter)
    assert record[0].filename == __file__
    assert len(report.warnings) == 1


def test_the_whole_report_instead_of_an_error():
    pair_drafter = drafter(target_hidden_size=48, num_target_layers=9, target_model_name_or_path="org/other", **OWN)
    report = check_alignment(target_config(name="org/this"), pair_drafter, raise_error=False)
    assert [finding.verdict for finding in report.findings] == [MUST_NOT_RUN, MUST_NOT_RUN, WILL_RUN_BADLY]
    assert [line.split(":")[0] for line in str(report).splitlines()] == [MUST_NOT_RUN, MUST_NOT_RUN, WILL_RUN_BADLY]
    with pytest.raises(AlignmentError, match="hidden_size"):
        report.raise_if_blocked()
