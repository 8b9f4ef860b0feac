"""Training data: what is read, what the target answers, what it asks itself, and files that survive a kill."""

import gzip
import io
import json
import sys
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import kit
import pytest
import torch
from rich.console import Console
from test_demo import FIXTURE, ascii_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf.cli import main
from dspark_hf.comparison import GREEDY
from dspark_hf.data import DataSettings, run_data, running, self_prompts
from dspark_hf.data.answering import Decoding, answer
from dspark_hf.data.encoding import Encoder
from dspark_hf.data.rows import LineFile, fingerprint, provenance_file
from dspark_hf.data.sieve import Sieve, words_of
from dspark_hf.data.sources import BadRow, read_excluded, read_sources, source_of
from dspark_hf.prompt_files import file_stem, read_prompts

# A user's words between < and ~, which also ends answers; a system's between { and ~.
TEMPLATE = (
    "{% for m in messages %}{{ {'user': '<', 'assistant': '>', 'system': '{'}[m['role']] }}{{ m['content'] }}~"
    "{% endfor %}{% if add_generation_prompt %}>{% if enable_thinking %}?{% endif %}{% endif %}"
)
END = ord("~")

# More ends, for a target that says every character about as often.
STOPS = [ord(character) for character in "#$@^`qxz~"]


def chat_tokenizer(template: str | None = TEMPLATE):
    tokenizer = ascii_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"eos_token": "~"})
    return tokenizer


def encoder(template: str | None = TEMPLATE, **options) -> Encoder:
    return Encoder(chat_tokenizer(template), vocab_size=128, stop_ids=frozenset([END]), **options)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    """A tiny random target in a folder, whose texts often end."""
    folder = tmp_path_factory.mktemp("target")
    model = AutoModelForCausalLM.from_pretrained(FIXTURE / "target")
    model.generation_config.eos_token_id = STOPS
    model.generation_config.pad_token_id = None
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


def write_lines(path: Path, *rows) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def sources(*rows, tmp_path, on_bad_row=None, **options):
    def refuse(bad):
        raise bad

    names = [write_lines(tmp_path / "some.jsonl", *rows)]
    defaults = {"split": "train", "num_prompts": None, "keep_responses": True}
    return read_sources(names, on_bad_row=on_bad_row or refuse, **{**defaults, **options})


def settings(target: str, tmp_path: Path, **options) -> DataSettings:
    small = {"max_new_tokens": 12, "batch_size": 4, "dtype": "float32", "device": "cpu"}
    return DataSettings(target=target, output=str(tmp_path / "rows.jsonl"), **{**small, **options})


def run(options: DataSettings) -> tuple[list[dict], str]:
    """The rows, and what was said."""
    console = Console(file=io.StringIO(), width=200)
    return read_lines(run_data(options, console)), console.file.getvalue()


WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
QUESTIONS = [f"Say {word} again" for word in WORDS]


@pytest.fixture
def questions(tmp_path) -> str:
    return write_lines(tmp_path / "questions.jsonl", *({"index": i, "prompt": q} for i, q in enumerate(QUESTIONS)))


class TestSources:
    @pytest.mark.parametrize(
        ("row", "prompt"),
        [
            ({"prompt": "Hello"}, "Hello"),
            ({"turns": ["Hello", "And then?"]}, "Hello"),
            ({"messages": [{"role": "user", "content": "Hello"}]}, "Hello"),
            ({"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]}, "Hello"),
            ({"text": "Hello", "prompt": None}, "Hello"),
        ],
    )
    def test_every_kind_of_row(self, row, prompt, tmp_path):
        (source,) = sources(row, tmp_path=tmp_path)
        assert source.prompt == prompt
        assert source.key == ("some", 1)
        assert (source.messages is None) == ("text" in row)

    def test_a_chat_is_answered_after_the_last_message_of_the_user(self, tmp_path):
        chat = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))]
        (source,) = sources({"messages": [*chat, {"role": "assistant", "content": "d"}]}, tmp_path=tmp_path)
        assert source.messages == chat

    @pytest.mark.parametrize(
        ("row", "problem"),
        [
            ("no json", "some.jsonl, line 2: no JSON (Expecting value, column 1)"),
            ("[1]", "line 2: a list, expected a JSON object"),
            ({"question": "Hello"}, "one of `messages`, `turns`, `prompt`, `text`, found question"),
            ({"prompt": 5}, "a prompt is int, expected text"),
            ({"prompt": " "}, "the prompt is empty"),
            ({"turns": []}, "list index out of range"),
            ({"turns": "Hello"}, "`turns` is str, expected a list of texts"),
            ({"text": 5}, "`text` is int, expected text"),
            ({"messages": "Hello"}, "`messages` is no list of messages"),
            ({"messages": [{"role": "user"}]}, "message 0 of `messages` lacks `role` or `content`"),
            ({"messages": [{"role": "system", "content": "Hello"}]}, "`messages` asks nothing"),
            ({"messages": [{"role": "assistant", "content": "Hello"}]}, "`messages` asks nothing"),
            ({"prompt": "Hello", "index": "7"}, "`index` is '7', expected a whole number"),
            ({"prompt": "Hello", "response_ids": []}, "`response_ids` is no list of token ids, or an empty one"),
            ({"prompt": "Hello", "response_ids": ["a"]}, "`response_ids` is no list of token ids"),
            ({"prompt": "Hello", "response": 5}, "`response` is int, expected text"),
            ({"prompt": "Again", "index": 1}, "dataset 'some' and index 1 are those of"),
        ],
    )
    def test_a_bad_row_is_named_and_may_be_skipped(self, row, problem, tmp_path):
        rows = [{"prompt": "Good", "index": 1}, row, {"prompt": "Good too", "index": 3}]
        with pytest.raises(BadRow) as caught:
            sources(*rows, tmp_path=tmp_path)
        assert problem in str(caught.value)
        skipped = []
        taken = sources(*rows, tmp_path=tmp_path, on_bad_row=skipped.append)
        assert [source.prompt for source in taken] == ["Good", "Good too"]
        assert len(skipped) == 1

    def test_files_may_be_compressed_and_come_in_order(self, tmp_path):
        with gzip.open(tmp_path / "first.jsonl.gz", "wt") as file:
            file.write('{"prompt": "A"}\n{"prompt": "B"}\n')
        names = [str(tmp_path / "first.jsonl.gz"), write_lines(tmp_path / "second.jsonl", {"prompt": "C"})]
        found = read_sources(names, split="", num_prompts=1, keep_responses=True, on_bad_row=print)
        assert [source.key for source in found] == [("first", 1), ("second", 1)]
        assert file_stem(Path("a.b.jsonl.gz")) == "a.b"
        assert [prompt.prompt for prompt in read_prompts(tmp_path / "first.jsonl.gz")] == ["A", "B"]

    def test_a_missing_file_and_an_empty_one(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere.jsonl is no file"):
            read_sources(["nowhere.jsonl"], split="", num_prompts=None, keep_responses=True, on_bad_row=print)
        with pytest.raises(ValueError, match="holds no prompt"):
            sources(tmp_path=tmp_path)

    def test_a_dataset_without_datasets(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ImportError, match=r"taken for the name of a dataset.*pip install 'dspark-hf\[train\]'"):
            read_sources(["some/name"], split="", num_prompts=None, keep_responses=True, on_bad_row=print)

    def test_a_dataset_of_the_hub(self, monkeypatch):
        asked = []
        fake = SimpleNamespace(load_dataset=lambda name, split: asked.append((name, split)) or [{"prompt": "Hello"}])
        monkeypatch.setitem(sys.modules, "datasets", fake)
        found = read_sources(["some/name"], split="test", num_prompts=None, keep_responses=True, on_bad_row=print)
        assert asked == [("some/name", "test")]
        assert [(source.key, source.where) for source in found] == [(("name", 0), "some/name (test), row 0")]

    def test_a_saved_dataset(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        saved = datasets.Dataset.from_list([{"prompt": "A", "text": None}, {"prompt": None, "text": "B"}])
        datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "mine")
        options = {"num_prompts": None, "keep_responses": True, "on_bad_row": print}
        found = read_sources([str(tmp_path / "mine")], split="train", **options)
        assert [(source.key, source.prompt) for source in found] == [(("mine", 0), "A"), (("mine", 1), "B")]
        with pytest.raises(ValueError, match="has no split test, but train"):
            read_sources([str(tmp_path / "mine")], split="test", **options)

    def test_responses_are_left_unread_on_request(self, tmp_path):
        row = {"prompt": "Hello", "prompt_ids": [1], "response": "Yes", "response_ids": [2]}
        (kept,) = sources(row, tmp_path=tmp_path)
        (left,) = sources(row, tmp_path=tmp_path, keep_responses=False)
        assert (kept.response, kept.response_ids, kept.prompt_ids) == ("Yes", [2], [1])
        assert (left.response, left.response_ids, left.prompt_ids) == (None, None, None)

    def test_all_that_a_user_says_is_excluded(self, tmp_path):
        chat = [{"role": "user", "content": "C"}, {"role": "assistant", "content": "D"}]
        rows = ({"turns": ["A", "B"], "index": 1}, {"messages": chat, "index": 1}, {"text": "E"})
        assert read_excluded([write_lines(tmp_path / "held_out.jsonl", *rows)]) == ["A", "B", "C", "E"]

    @pytest.mark.parametrize(
        "row",
        [
            {"id": 5},
            {"turns": "Hello"},
            {"turns": 5},
            {"messages": "Hello"},
            {"messages": ["Hello"]},
            {"messages": [{"role": "user"}]},
        ],
    )
    def test_what_cannot_be_excluded_is_named(self, row, tmp_path):
        with pytest.raises(BadRow, match="line 1: expected text"):
            read_excluded([write_lines(tmp_path / "bad.jsonl", row)])

    def test_a_file_that_excludes_nothing_is_a_mistake(self, tmp_path):
        with pytest.raises(ValueError, match=r"empty.jsonl holds no prompt to exclude"):
            read_excluded([write_lines(tmp_path / "empty.jsonl")])

    def test_an_empty_response_is_none(self, tmp_path):
        (source,) = sources({"prompt": "Hello", "response": ""}, tmp_path=tmp_path)
        assert not source.is_given

    def test_empty_lines_and_a_mark_before_the_first_are_passed_over(self, tmp_path):
        path = tmp_path / "marked.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"prompt": "A"}\n\n{"prompt": "B"}\n \n')
        found = read_sources([str(path)], split="", num_prompts=None, keep_responses=True, on_bad_row=print)
        assert [source.key for source in found] == [("marked", 1), ("marked", 3)]
        assert [(prompt.prompt, prompt.index) for prompt in read_prompts(path)] == [("A", 1), ("B", 3)]

    def test_a_file_that_is_cut_off_or_in_another_encoding(self, tmp_path):
        whole = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % i for i in range(9000)))
        (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "A"}\n{"prompt": "\xe4"}\n')
        for name, message in (("cut.jsonl.gz", "in the midst of compressed data"), ("latin.jsonl", "not UTF-8")):
            with pytest.raises(ValueError, match=message):
                read_prompts(tmp_path / name)


class TestEncoding:
    def ids_of(self, row: dict, **options) -> list[int]:
        return encoder(**options).prompt_ids(source_of(row, "here", "some", 1))

    def text_of(self, row: dict, **options) -> str:
        return chat_tokenizer().decode(self.ids_of(row, **options))

    def test_a_prompt_goes_through_the_template(self):
        assert self.text_of({"prompt": "Hello"}) == "<Hello~>"
        assert self.text_of({"prompt": "Hello"}, enable_thinking=True) == "<Hello~>?"
        assert self.text_of({"prompt": "Hello"}, enable_thinking=False) == "<Hello~>"

    def test_so_does_a_chat(self):
        chat = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
        assert self.text_of({"messages": [{"role": r, "content": c} for r, c in chat]}) == "{S~<A~>B~<C~>"

    def test_a_document_is_cut_and_has_no_template(self):
        assert self.text_of({"text": "Once upon a time"}, text_tokens=4) == "Once"

    def test_without_a_template_a_prompt_stands_alone_and_a_chat_is_bad(self):
        assert self.text_of({"prompt": "Hello"}, template=None) == "Hello"
        chat = [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]
        with pytest.raises(BadRow, match="no chat template"):
            self.ids_of({"messages": chat}, template=None)

    def test_a_chat_that_the_template_refuses(self):
        with pytest.raises(BadRow, match="here: the chat template refuses it: no user please"):
            self.ids_of({"prompt": "Hello"}, template="{{ raise_exception('no user please') }}")

    @pytest.mark.parametrize(
        ("row", "problem"),
        [
            ({"response_ids": [200]}, "`response_ids` has the id 200, the target's vocabulary ends before 128"),
            ({"response": "No", "response_ids": [89, 101]}, "`response` is not the text of `response_ids`"),
            ({"response": "No", "prompt_ids": [200]}, "`prompt_ids` has the id 200"),
            ({"response": "No", "prompt_ids": [65]}, "`prompt` does not stand in `prompt_ids`"),
        ],
    )
    def test_a_given_row_of_another_tokenizer(self, row, problem):
        source = source_of({"prompt": "Hello", **row}, "here", "some", 1)
        with pytest.raises(BadRow, match=problem):
            encoder().prompt_ids(source)
            encoder().given_response_ids(source)

    def test_an_answer_in_text_ends_as_the_template_ends_it(self):
        template = TEMPLATE.replace("}}~", "}}{{ '$' if m['role'] == 'assistant' else '~' }}")
        row = {"prompt": "Hello", "response": "Yes"}
        for ends, last in ([END, ord("$")], "$"), ([END], "~"):
            its = Encoder(chat_tokenizer(template), vocab_size=128, stop_ids=frozenset(ends))
            ids = its.given_response_ids(source_of(row, "here", "some", 1))
            assert bytes(ids).decode() == f"Yes{last}"

    def test_given_rows(self):
        def given(**row):
            return encoder().given_response_ids(source_of({"prompt": "Hello", **row}, "here", "some", 1))

        assert given(response="Yes") == [*b"Yes", END]
        assert given(response_ids=[*b"Yes", END]) == [*b"Yes", END]
        assert given(response="Yes", response_ids=[*b"Yes", END]) == [*b"Yes", END]
        assert given(response="Yes~", response_ids=[*b"Yes", END]) == [*b"Yes", END]
        assert given(response="Yes", response_ids=[*b"Yes"]) == [*b"Yes"]  # not ended in its time
        ids = self.ids_of({"prompt": "Hello", "response": "Yes", "prompt_ids": [*b"<<Hello~>"]})
        assert ids == [*b"<<Hello~>"]

    def test_where_a_user_speaks(self):
        assert encoder().user_frame() == ([ord("<")], frozenset([END]))
        system = "{System~" + TEMPLATE
        assert encoder(system).user_frame()[0] == [*b"{System~<"]

    @pytest.mark.parametrize(
        ("template", "problem"),
        [
            (None, "has no chat template"),
            ("{{ raise_exception('never') }}", "refuses a user's message .never."),
            ("<nothing of it>", "shows no header before a user's message"),
            ("{% for m in messages %}{{ m['content'] }}~{% endfor %}", "shows no header"),
        ],
    )
    def test_a_template_without_a_place_for_a_user(self, template, problem):
        with pytest.raises(ValueError, match=problem):
            encoder(template).user_frame()

    def test_a_message_without_an_end(self):
        never = Encoder(chat_tokenizer("<{{ messages[0]['content'] }}>"), vocab_size=128, stop_ids=frozenset())
        with pytest.raises(ValueError, match="no token that ends"):
            never.user_frame()


class TestAnswers:
    PROMPTS = tuple([(7 * n + 3 * i) % 90 for i in range(3 + 5 * n)] for n in range(9))
    STOPS = frozenset(range(40, 52))

    def alone(self, model, prompt, decoding: Decoding) -> list[int]:
        output = model.generate(
            **kit.inputs(prompt),
            **decoding.arguments,
            max_new_tokens=decoding.max_new_tokens,
            eos_token_id=sorted(decoding.stop_ids) or None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    @pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "qwen3_moe"])
    @pytest.mark.parametrize("stops", [STOPS, frozenset()], ids=["stops", "none"])
    def test_each_is_what_its_prompt_alone_gets(self, family, stops):
        model, decoding = kit.target(family), Decoding(40, stops, GREEDY)
        expected = [self.alone(model, prompt, decoding) for prompt in self.PROMPTS]
        lengths = {len(response) for response in expected}
        assert (len(lengths) > 2) == bool(stops)  # rows leave, wait, and go on
        for batch_size in (1, 4, 16):
            answers = [*answer(model, self.PROMPTS, decoding, batch_size)]
            assert sorted(number for number, _ in answers) == [*range(len(self.PROMPTS))]
            assert [response for _, response in sorted(answers)] == expected

    @pytest.mark.parametrize(
        ("setting", "stops"),
        [
            ({"min_new_tokens": 25}, STOPS),
            ({"begin_suppress_tokens": [*range(52, 97)]}, frozenset({41})),
            ({"exponential_decay_length_penalty": (20, 1.5)}, frozenset({41})),
            ({"forced_eos_token_id": 41}, frozenset({41})),
        ],
        ids=["min_new_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty", "forced_eos_token_id"],
    )
    def test_what_the_target_counts_from_the_first_token_is_counted_from_there(self, setting, stops):
        model, decoding = kit.new_target(), Decoding(40, stops, GREEDY)
        plain = [self.alone(model, prompt, decoding) for prompt in self.PROMPTS]
        model.generation_config.update(**setting)
        expected = [self.alone(model, prompt, decoding) for prompt in self.PROMPTS]
        assert expected != plain
        answers = [*answer(model, self.PROMPTS, decoding, 4)]
        assert [response for _, response in sorted(answers)] == expected

    def test_rows_that_end_are_not_computed_any_more(self):
        model, decoding = kit.new_target(), Decoding(64, self.STOPS, GREEDY)
        shapes = []
        model.register_forward_pre_hook(
            lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        needed = sum(len(response) for _, response in answer(model, self.PROMPTS, decoding, 4))
        prefilled = sum(rows * length for rows, length in shapes if length > 1)
        decoded = sum(rows for rows, length in shapes if length == 1)
        assert decoded < needed + 16 * len(self.PROMPTS)
        assert prefilled < 2 * sum(map(len, self.PROMPTS)) + 64 * len(self.PROMPTS)

    def test_sampling_draws_from_the_target(self):
        model = kit.target()
        sampling = {**GREEDY, "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        torch.manual_seed(0)
        answers = answer(model, [kit.PROMPT] * 4000, Decoding(1, frozenset(), sampling), 1000)
        counts = torch.bincount(torch.tensor([ids[0] for _, ids in answers]), minlength=kit.VOCAB)
        with torch.inference_mode():
            logits = model(**kit.inputs()).logits[0, -1]
        expected = logits.float().softmax(-1)
        assert (counts / 4000 - expected).abs().sum() < 0.15


class TestSieve:
    def taken(self, *prompts: str, **options) -> list[str]:
        sieve = Sieve(**options)
        return [prompt for prompt in prompts if sieve.take(prompt)]

    def test_words(self):
        assert words_of("What's  THIS, then?") == ("what", "s", "this", "then")
        assert words_of("这是什么 in English") == ("这", "是", "什", "么", "in", "english")

    @pytest.mark.parametrize(
        ("prompt", "reason"),
        [
            ("", "too short"),
            ("Hi there!", "too short"),
            ("Please summarize the following text:", "breaks off"),
            ("go on and on and on and on and on and on and on", "repeats itself"),
            ("what is the CAPITAL of  France", "there before"),
            ("Tell me: how do I bake a good loaf of bread at home?", "there before"),
            ("Why is the sky so blue, and the sea so green, and the grass?", "there before"),
        ],
    )
    def test_refusals(self, prompt, reason):
        sieve = Sieve(["How do I bake a good loaf of bread?", "Why is the sky so blue, and the sea?"])
        assert sieve.take("What is the capital of France?")
        assert not sieve.take(prompt)
        assert dict(sieve.refused) == {reason: 1}

    def test_what_is_alike_but_not_the_same_is_kept(self):
        prompts = ("What is the capital of France?", "What is the capital of Spain?", "这是什么", "那是谁的书")
        assert self.taken(*prompts) == [*prompts]

    def test_openings_are_rationed(self):
        prompts = [f"Can you provide a list {word}" for word in ("of bones", "for Christmas", "with prices")]
        assert self.taken(*prompts, max_per_opening=2) == prompts[:2]

    def test_known_prompts_do_not_use_up_openings(self):
        known = [f"Can you provide a list {word}" for word in ("of bones", "for Christmas")]
        assert self.taken("Can you provide a list with prices", known=known, max_per_opening=1)


class TestFiles:
    def test_a_line_that_a_kill_cut_off_is_taken_back(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_bytes('{"a": "ä\u2028"}\n{"a": "ü"}'.encode()[:-3])
        file = LineFile(path)
        assert file.rows == [{"a": "ä\u2028"}]
        file.append([{"a": 2}])
        assert path.read_text(encoding="utf-8") == '{"a": "ä\u2028"}\n{"a": 2}\n'
        assert LineFile(path).rows == file.rows

    @pytest.mark.parametrize("line", ["{", "5"])
    def test_any_other_broken_line_is_named(self, line, tmp_path):
        with pytest.raises(ValueError, match=r"rows.jsonl, line 2: "):
            LineFile(Path(write_lines(tmp_path / "rows.jsonl", {"a": 1}, line, {"a": 3})))

    def test_fingerprints(self):
        model, other = kit.new_target(), kit.new_target()
        assert fingerprint(model) == fingerprint(other)
        with torch.no_grad():
            other.model.norm.weight += 0.01
        assert fingerprint(model) != fingerprint(other)


class TestCommand:
    def test_rows_of_prompts(self, target, questions, tmp_path):
        rows, said = run(settings(target, tmp_path, prompts=[questions]))
        assert sorted(row["index"] for row in rows) == [*range(10)]
        assert "10 rows" in said and "answers: 10 of 10" in said
        model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
        for row in rows:
            assert row["prompt"] == QUESTIONS[row["index"]]
            assert [*row] == ["dataset", "index", "prompt", "prompt_ids", "response_ids", "response"]
            assert tokenizer.decode(row["prompt_ids"]) == f"<{row['prompt']}~>"
            alone = model.generate(**kit.inputs(row["prompt_ids"]), max_new_tokens=12, do_sample=False)
            assert row["response_ids"] == alone[0, len(row["prompt_ids"]) :].tolist()
            assert row["response"] == tokenizer.decode(row["response_ids"], skip_special_tokens=True)

    def test_what_rows_share_stands_beside_them(self, target, questions, tmp_path):
        run(settings(target, tmp_path, prompts=[questions], num_prompts=1))
        shared = json.loads((tmp_path / "rows.provenance.json").read_text())
        # The name of the folder, which is nobody's but this machine's.
        assert shared["target"] == Path(target).name
        assert (shared["dtype"], shared["decoding"], shared["max_new_tokens"]) == ("float32", "greedy", 12)
        assert shared["stop_ids"] == STOPS
        assert [*shared["environments"][0]][:3] == ["dspark_hf", "transformers", "torch"]

    @pytest.mark.parametrize("num_bytes_lost", [1, 40])
    def test_a_run_that_was_killed_goes_on(self, target, questions, tmp_path, num_bytes_lost, monkeypatch):
        whole, _ = run(settings(target, tmp_path, prompts=[questions]))
        path = tmp_path / "rows.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:6])[:-num_bytes_lost])
        answered = []
        real = running.answer
        monkeypatch.setattr(running, "answer", lambda t, prompts, *a: answered.extend(prompts) or real(t, prompts, *a))
        again, _ = run(settings(target, tmp_path, prompts=[questions]))
        assert len(answered) == 5
        assert again[:5] == whole[:5]
        assert sorted(again, key=lambda row: row["index"]) == sorted(whole, key=lambda row: row["index"])

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"max_new_tokens": 13}, "another max_new_tokens: 12 there, 13 now"),
            ({"do_sample": True}, "another decoding: greedy there"),
            ({"enable_thinking": True}, "another enable_thinking: None there, True now"),
            ({"dtype": "bfloat16"}, "another dtype: float32 there, bfloat16 now"),
        ],
    )
    def test_rows_made_in_two_ways_do_not_mix(self, target, questions, tmp_path, changed, message):
        run(settings(target, tmp_path, prompts=[questions], num_prompts=1))
        before = (tmp_path / "rows.jsonl").read_bytes()
        with pytest.raises(ValueError, match=message):
            run(settings(target, tmp_path, prompts=[questions], **changed))
        assert (tmp_path / "rows.jsonl").read_bytes() == before

    def test_without_a_row_nothing_has_to_be_repeated(self, target, questions, tmp_path, monkeypatch):
        def interrupted(*args):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(running, "answer", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(settings(target, tmp_path, prompts=[questions]))
        rows, _ = run(settings(target, tmp_path, prompts=[questions], max_new_tokens=13))
        assert len(rows) == 10
        assert json.loads((tmp_path / "rows.provenance.json").read_text())["max_new_tokens"] == 13

    def test_a_chat_that_holds_an_excluded_prompt_is_left_out(self, target, tmp_path):
        chat = [{"role": r, "content": c} for r, c in (("user", "Held out"), ("assistant", "b"), ("user", "Go on"))]
        rows = write_lines(tmp_path / "chats.jsonl", {"messages": chat}, {"prompt": "Say one"})
        held_out = write_lines(tmp_path / "held_out.jsonl", {"prompt": "Held out"})
        made, _ = run(settings(target, tmp_path, prompts=[rows]))
        assert len(made) == 2
        with pytest.raises(ValueError, match="its prompt is excluded"):
            run(settings(target, tmp_path, prompts=[rows], exclude=[held_out]))
        (tmp_path / "rows.jsonl").unlink()
        made, said = run(settings(target, tmp_path, prompts=[rows], exclude=[held_out]))
        assert [row["prompt"] for row in made] == ["Say one"]
        assert "left out 1 excluded prompts" in said

    @pytest.mark.parametrize("implementation", ["static", "dynamic"])
    def test_a_target_that_asks_for_a_cache_of_its_own(self, target, questions, tmp_path, implementation):
        folder = tmp_path / "cached"
        model = AutoModelForCausalLM.from_pretrained(target)
        model.generation_config.cache_implementation = implementation
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(target).save_pretrained(folder)
        plain, _ = run(settings(target, tmp_path, prompts=[questions]))
        (tmp_path / "rows.jsonl").unlink()
        assert run(settings(str(folder), tmp_path, prompts=[questions]))[0] == plain

    def test_nor_do_rows_of_two_targets(self, target, questions, tmp_path):
        run(settings(target, tmp_path, prompts=[questions], num_prompts=1))
        model = AutoModelForCausalLM.from_pretrained(target)
        with torch.no_grad():
            model.model.norm.weight += 0.1
        other = tmp_path / "other"
        model.save_pretrained(other)
        chat_tokenizer().save_pretrained(other)
        path = provenance_file(tmp_path / "rows.jsonl")
        path.write_text(path.read_text().replace(Path(target).name, "other"))  # the name alone would not tell
        with pytest.raises(ValueError, match="another weights"):
            run(settings(str(other), tmp_path, prompts=[questions]))

    def test_a_file_of_somebody_else_is_left_alone(self, target, questions, tmp_path):
        write_lines(tmp_path / "rows.jsonl", {"a": 1})
        with pytest.raises(ValueError, match=r"no rows.provenance.json that says how it was made"):
            run(settings(target, tmp_path, prompts=[questions]))
        assert read_lines(tmp_path / "rows.jsonl") == [{"a": 1}]

    def test_other_prompts_under_the_same_names_are_refused(self, target, questions, tmp_path):
        run(settings(target, tmp_path, prompts=[questions]))
        write_lines(Path(questions), {"index": 3, "prompt": "Something else"})
        with pytest.raises(ValueError, match=r"another prompt for questions 3 than .*line 1"):
            run(settings(target, tmp_path, prompts=[questions]))

    def test_more_prompts_may_be_added(self, target, questions, tmp_path):
        run(settings(target, tmp_path, prompts=[questions], num_prompts=3))
        more = write_lines(tmp_path / "more.jsonl", {"text": "Once upon a time"}, {"turns": ["Hello", "?"]})
        rows, _ = run(settings(target, tmp_path, prompts=[questions, more], num_prompts=5, text_tokens=64))
        assert len(rows) == 7
        documents = [row for row in rows if row["dataset"] == "more" and row["index"] == 1]
        assert documents[0]["prompt_ids"] == [*b"Once upon a time"]

    def test_given_responses_are_taken_as_they_are(self, target, tmp_path, monkeypatch):
        def never(*args):
            yield from ()
            assert not args[1]

        monkeypatch.setattr(running, "answer", never)
        given = [
            {"prompt": "Hello", "response": "Yes"},
            {"prompt": "Hello", "prompt_ids": [*b"<Hello~>"], "response_ids": [*b"No", END], "response": "No"},
            {"messages": [{"role": r, "content": "C"} for r in ("user", "assistant", "user")], "response": "D"},
        ]
        rows, _ = run(settings(target, tmp_path, prompts=[write_lines(tmp_path / "given.jsonl", *given)]))
        assert [row["response_ids"] for row in rows] == [[*b"Yes", END], [*b"No", END], [*b"D", END]]
        assert all(row["given"] for row in rows)
        assert rows[2]["messages"] == given[2]["messages"] and "messages" not in rows[0]
        assert rows[2]["prompt_ids"] == [*b"<C~>C~<C~>"]

    def test_bad_rows_stop_a_run_before_it_starts_or_are_skipped(self, target, tmp_path):
        file = write_lines(tmp_path / "some.jsonl", {"prompt": "Good"}, {"prompt": "Hello", "response_ids": [200]})
        with pytest.raises(ValueError, match=r"some.jsonl, line 2: .*Mend the row, or pass --skip-bad-rows"):
            run(settings(target, tmp_path, prompts=[file]))
        assert not (tmp_path / "rows.jsonl").exists()
        rows, said = run(settings(target, tmp_path, prompts=[file], skip_bad_rows=True))
        assert [row["prompt"] for row in rows] == ["Good"]
        assert "skipped" in said and "line 2" in said

    def test_long_prompts_are_left_out(self, target, questions, tmp_path):
        rows, said = run(settings(target, tmp_path, prompts=[questions], max_prompt_tokens=16))
        assert {len(row["prompt_ids"]) for row in rows} == {16}
        assert f"left out {10 - len(rows)} prompts longer than --max-prompt-tokens 16" in said

    def test_excluded_prompts_are_never_taken(self, target, questions, tmp_path):
        held_out = write_lines(tmp_path / "held_out.jsonl", {"turns": ["?", "say THREE  again!"]})
        rows, said = run(settings(target, tmp_path, prompts=[questions], exclude=[held_out]))
        assert len(rows) == 9 and QUESTIONS[2] not in [row["prompt"] for row in rows]
        assert "left out 1 excluded prompts" in said

    def test_what_an_earlier_run_answered_and_is_excluded_now(self, target, questions, tmp_path):
        run(settings(target, tmp_path, prompts=[questions], num_prompts=1))
        held_out = write_lines(tmp_path / "held_out.jsonl", {"prompt": QUESTIONS[0]})
        with pytest.raises(ValueError, match=r"rows.jsonl, line 1: its prompt is excluded"):
            run(settings(target, tmp_path, prompts=[questions], exclude=[held_out]))

    def test_sampling_has_a_seed(self, target, questions, tmp_path):
        texts = []
        for number, seed in enumerate((1, 1, 2)):
            folder = tmp_path / str(number)
            folder.mkdir()
            rows, _ = run(settings(target, folder, prompts=[questions], do_sample=True, seed=seed))
            texts.append([row["response_ids"] for row in rows])
        assert texts[0] == texts[1] != texts[2]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--prompts", "a.jsonl"], "--output is missing"),
            (["--output", "rows.jsonl"], "--prompts or --self-prompts is missing"),
            (["--output", "rows.jsonl.gz", "--self-prompts", "1"], "expected a name that ends in .jsonl"),
            (["--output", "/no/folder/rows.jsonl", "--self-prompts", "1"], "whose folder does not exist"),
            (["--output", "r.jsonl", "--self-prompts", "-1"], "--self-prompts is -1, it must be 0 or more"),
            (["--output", "r.jsonl", "--self-prompts", "1", "--batch-size", "0"], "--batch-size is 0"),
            (["--output", "r.jsonl", "--self-prompts", "1", "--self-top-p", "0"], "--self-top-p is 0.0"),
            (["--output", "r.jsonl", "--self-prompts", "1", "--temperature", "0"], "--temperature is 0.0"),
            (["--output", "r.jsonl", "--self-prompts", "1", "--exclude", "no.jsonl"], "--exclude names no.jsonl"),
        ],
    )
    def test_wrong_arguments(self, arguments, message, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["data", *arguments])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err

    def test_a_missing_file_costs_no_loading(self, tmp_path, capsys):
        assert main(["data", "--output", str(tmp_path / "r.jsonl"), "--prompts", "no.jsonl"]) == 1
        assert capsys.readouterr().err == "dspark-hf: no.jsonl is no file on this machine\n"


class TestSelfPrompts:
    def texts(self, monkeypatch, *texts: str) -> list[list[int]]:
        """The target says these texts in the user's place, again and again. Returns what it was to go on from."""
        asked, said = [], cycle(texts)

        def fake(target, prompts, decoding, batch_size):
            asked.extend(prompts)
            for number in range(len(prompts)):
                yield number, [*next(said).encode()]

        monkeypatch.setattr(self_prompts, "answer", fake)
        return asked

    def test_the_target_asks_and_answers(self, target, tmp_path):
        rows, said = run(settings(target, tmp_path, self_prompts=5))
        own = read_lines(tmp_path / "rows.self-prompts.jsonl")
        assert [(row["dataset"], row["index"]) for row in own] == [("self", i) for i in range(5)]
        assert len({row["prompt"] for row in own}) == 5
        assert sorted((row["index"], row["prompt"]) for row in rows) == [(row["index"], row["prompt"]) for row in own]
        tokenizer = AutoTokenizer.from_pretrained(target)
        assert all(tokenizer.decode(row["prompt_ids"]) == f"<{row['prompt']}~>" for row in rows)
        assert "prompts: 5 of 5" in said

    def test_only_what_can_be_used_is_asked(self, target, questions, tmp_path, monkeypatch):
        good = ("Tell me about old ships~", "Where do swallows sleep?~")
        bad = ("Hi~", "No end to this", "A mark ~ inside~", "Tell me about old ships!~", "Say one again~")
        asked = self.texts(monkeypatch, *good, *bad, "What now, captain?~")
        held_out = write_lines(tmp_path / "held_out.jsonl", {"prompt": "Where do swallows sleep"})
        options = {"prompts": [questions], "num_prompts": 2, "exclude": [held_out], "self_prompts": 2}
        rows, said = run(settings(target, tmp_path, **options))
        own = [row["prompt"] for row in rows if row["dataset"] == "self"]
        assert sorted(own) == ["Tell me about old ships", "What now, captain?"]
        assert {tuple(ids) for ids in asked} == {(ord("<"),)}
        for reason in ("3 prompts of the target's own: there before", "1 prompts of the target's own: too short"):
            assert f"refused {reason}" in said
        assert "special tokens inside" in said and "too long" in said

    def test_openings_are_gone_on_from(self, target, tmp_path, monkeypatch):
        asked = self.texts(monkeypatch, " is the sea salty?~", " do birds sing so early?~")
        openings = tmp_path / "openings.txt"
        openings.write_text("Why\n\nWhen \n")
        rows, _ = run(settings(target, tmp_path, self_prompts=2, self_openings=str(openings)))
        assert [bytes(ids) for ids in asked[:3]] == [b"<Why", b"<When", b"<Why"]
        assert sorted(row["prompt"] for row in rows) == ["When do birds sing so early?", "Why is the sea salty?"]

    def test_a_run_goes_on_with_the_prompts_that_are_there(self, target, tmp_path, monkeypatch):
        self.texts(monkeypatch, "Tell me about old ships~", "Where do swallows sleep?~")
        run(settings(target, tmp_path, self_prompts=2))
        self.texts(monkeypatch, "Tell me about old ships~", "What now, captain?~")
        rows, _ = run(settings(target, tmp_path, self_prompts=3))
        assert [row["prompt"] for row in sorted(rows, key=lambda row: row["index"])] == [
            "Tell me about old ships",
            "Where do swallows sleep?",
            "What now, captain?",
        ]

    def test_an_interrupted_run_does_not_draw_the_same_prompts_again(self, target, tmp_path, monkeypatch):
        seeds = []
        monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed))
        self.texts(monkeypatch, "Tell me about old ships~")
        for _ in range(2):
            with pytest.raises(ValueError, match="nothing new"):
                run(settings(target, tmp_path, self_prompts=3))
            self.texts(monkeypatch, "Where do swallows sleep?~")
        drawn = seeds[1::2]
        assert len(set(drawn)) == 2

    def test_a_target_with_nothing_more_to_ask(self, target, tmp_path, monkeypatch):
        self.texts(monkeypatch, "Tell me about old ships~")
        with pytest.raises(ValueError, match="has written 1 of 2 prompts, and nothing new in its last 640 attempts"):
            run(settings(target, tmp_path, self_prompts=2))
        assert len(read_lines(tmp_path / "rows.self-prompts.jsonl")) == 1

    def test_the_way_of_asking_is_part_of_the_provenance(self, target, questions, tmp_path):
        run(settings(target, tmp_path, prompts=[questions], num_prompts=1))
        run(settings(target, tmp_path, prompts=[questions], num_prompts=1, self_prompts=1))
        with pytest.raises(ValueError, match="another self_prompts"):
            run(settings(target, tmp_path, self_prompts=2, self_temperature=0.5))
