"""`dspark-hf data`: prompts to the target's own responses, the rows that a drafter is trained on.

A row is a JSON object on a line of its own:

- `dataset`, `index`: where the prompt comes from; together they name the row;
- `prompt`: the last message of the user, or the document; `messages`: the whole chat, where it is longer;
- `prompt_ids`: token ids of all that the target reads before it answers, the generation prompt included;
- `response_ids`: token ids of the answer, the EOS token last where it ended within `max_new_tokens`. The loss counts
  here and nowhere else;
- `response`: its text without special tokens;
- `given`: true where the file of prompts already held the response.

What all rows share (target, decoding, versions) stands once, in `NAME.provenance.json` beside `NAME.jsonl`.
"""

from .running import run_data
from .settings import DataSettings

__all__ = ["DataSettings", "run_data"]
