"""Writes `model_cards/published/`: for each published drafter that opens here, a card that waits for measurements.

python model_cards/make_templates.py

The pairs are those of `dspark_hf/known_pairs.yaml`.
"""

from pathlib import Path

from huggingface_hub import ModelCardData

from dspark_hf.hub.card import BASE_MODEL_RELATION, LIBRARY_NAME, TAGS
from dspark_hf.registry import SUPPORTED, KnownPair, known_pairs

FOLDER = Path(__file__).parent / "published"
PAPERS = {"DSpark": "https://arxiv.org/abs/2607.05147", "DFlash": "https://arxiv.org/abs/2602.06036"}

UNMEASURED = "Nobody has measured this pair here yet."
TEMPLATE = """---
{metadata}
---

# {name}

A [{algorithm}]({paper}) drafter for [{target}](https://huggingface.co/{target}), published as
[{drafter}](https://huggingface.co/{drafter}) ([source]({source})).
Its format, {format}, opens as it is.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from dspark_hf import DSparkDrafter

tokenizer = AutoTokenizer.from_pretrained("{target}")
model = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto", device_map="auto")
inputs = tokenizer("The divisors of 360 are", return_tensors="pt").to(model.device)

drafter = DSparkDrafter.from_pretrained(
    "{drafter}",
    dtype=model.dtype,
    device_map="auto",
)
output = model.generate(**inputs, assistant_model=drafter, max_new_tokens=128)
```

## Acceptance and speed

{unmeasured} What makes the tables, on the built-in prompts or on yours (`--prompts`):

```bash
dspark-hf check --target {target} --drafter {drafter}
dspark-hf eval --target {target} --drafter {drafter} \\
    --json {name}.json --markdown {name}.md --plot {name}
dspark-hf profile --target {target} --drafter {drafter}
```

Measured it? Put JSON file and figures into a folder of their own in `model_cards/`, and the tables here, with the
machine beside them.
"""


def file_name(pair: KnownPair) -> str:
    """Of the card: owner and name, as a cache of the Hub writes them."""
    return pair.drafter.replace("/", "--") + ".md"


def card(pair: KnownPair) -> str:
    """Metadata that the Hub reads, how the pair is used, how it is measured."""
    tags = [tag for tag in TAGS if tag != "custom_generate"]  # their repositories hold no code of ours
    metadata = ModelCardData(
        base_model=pair.target,
        base_model_relation=BASE_MODEL_RELATION,
        library_name=LIBRARY_NAME,
        pipeline_tag="text-generation",
        tags=[pair.algorithm.lower() if tag == "dspark" else tag for tag in tags],
    )
    return TEMPLATE.format(
        metadata=metadata.to_yaml(),
        name=pair.drafter.rpartition("/")[2],
        algorithm=pair.algorithm,
        paper=PAPERS[pair.algorithm],
        target=pair.target,
        drafter=pair.drafter,
        source=pair.source,
        format=pair.format,
        unmeasured=UNMEASURED,
    )


def cards() -> dict[str, str]:
    """All of them, by the name of the file."""
    return {file_name(pair): card(pair) for pair in known_pairs() if pair.status == SUPPORTED}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    filled = {page.name for page in FOLDER.glob("*.md") if UNMEASURED not in page.read_text(encoding="utf-8")}
    for page in FOLDER.glob("*.md"):
        if page.name not in filled:
            page.unlink()
    for name, text in cards().items():
        if name not in filled:
            (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(cards())} cards in {FOLDER}, {len(filled)} of them filled and left as they are")
