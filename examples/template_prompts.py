"""Prompts for a target's responses, put together from lists of words: sums in words, small programs, chat.

python examples/template_prompts.py --num-prompts 1000 --output prompts.jsonl
dspark-hf data --prompts prompts.jsonl --output responses.jsonl

A drafter learns from what its target says, so what prompts ask has to be varied more than it has to be wise. No prompt
of a benchmark is among these; `dspark-hf data --exclude` makes sure of that.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

Kind = Callable[[random.Random], str]


def listed(text: str, between: str = " ") -> list[str]:
    return text.split(between)


REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."

NAMES = listed(
    "Ada Amir Anna Ben Carla Chen Clara David Dina Elena Emma Ethan Fatima Felix Grace Hassan Hugo Ines Ivan "
    "Jack Jamal Julia Kofi Laura Leo Lily Lucas Maria Marta Max Mei Mia Nadia Nina Noah Omar Oscar Paula Peter "
    "Priya Raj Rita Rosa Sam Sara Sofia Tariq Tom Victor Wei Yuki Zoe"
)
THINGS = listed(
    "apples books stamps marbles pencils cookies oranges stickers coins shells cards balloons flowers candles "
    "cups eggs muffins tickets bottles bricks buttons crayons toys lemons notebooks plates postcards ribbons "
    "seeds shirts"
)
PLACES = listed("farm bakery school library market factory garden museum bookshop hotel restaurant zoo")
VEHICLES = listed("train bus car cyclist truck ship")
CONTAINERS = listed("boxes bags baskets crates shelves drawers")

SUMS = (
    "{name} has {a} {thing}. {name2} has {k} times as many. How many {thing} do they have together?",
    "{name} buys {a} {thing} for ${p} each and {b} {thing2} for ${q} each. How much does {name} spend in total?",
    "A {place} sells {a} {thing} on Monday, {b} on Tuesday and twice as many as on Tuesday on Wednesday. How many "
    "{thing} does it sell in the three days?",
    "{name} works {h} hours a day for {d} days a week and earns ${p} an hour. How much does {name} earn in {w} weeks?",
    "A {vehicle} travels at {s} miles per hour for {h} hours and then at {s2} miles per hour for {h2} hours. How far "
    "does it travel?",
    "{name} packs {n} {thing} into {containers} of {k}. How many {containers} are needed, and how many {thing} are in "
    "the last one?",
    "{name} had {n} {thing} and gave {pct}% of them to {name2}. How many {thing} does {name} have left?",
    "A shirt costs ${n}. In a sale the price goes down by {pct}%, and {name} has a coupon for another ${k}. How much "
    "does {name} pay?",
    "{name} is {k} years older than {name2}. In {w} years the sum of their ages will be {n}. How old is {name} now?",
    "The {place} has {a} rows of {b} {thing}. {k} of the rows are empty. How many {thing} are there?",
    "{name} reads {a} pages a day. A book has {n} pages. How many days does it take {name} to read {k} such books?",
    "{name} needs {k} cups of flour for {d} cakes. How many cups does {name} need for {b} cakes?",
    "A tank holds {n} liters. It is filled at {a} liters per minute and loses {k} liters per minute. How many minutes "
    "does it take to fill the tank?",
    "{name} saves ${a} in the first week, and in every week after that ${k} more than in the week before. How much "
    "has {name} saved after {d} weeks?",
    "At a {place}, {pct}% of the {n} visitors are children. A child pays ${k} and an adult ${p}. How much do all of "
    "them pay?",
    "{name}, {name2} and {name3} share {n} {thing}. {name} takes half of them and {name2} takes a third of the rest. "
    "How many {thing} are left for {name3}?",
)
EXERCISES = (
    "What is the sum of the first {n} positive integers that are divisible by {k}?",
    "Solve for $x$: ${k}x + {a} = {n}$.",
    "Find the area of a triangle with base {a} and height {b}.",
    "What is the remainder when ${a}^{{{k}}}$ is divided by {p}?",
    "Compute $\\frac{{{a}}}{{{b}}} + \\frac{{{k}}}{{{p}}}$ and give the result in lowest terms.",
    "How many positive divisors does {n} have?",
    "The roots of $x^2 - {a}x + {b} = 0$ are $r$ and $s$. What is $r^2 + s^2$?",
    "In how many ways can {k} people be chosen from a group of {d2}?",
    "A circle has a radius of {a}. What is its area in terms of $\\pi$?",
    "What is the greatest common divisor of {n} and {n2}?",
    "If $f(x) = {k}x^2 - {a}x + {p}$, what is $f({d})$?",
    "A fair die is rolled {k} times. What is the probability that no roll is a six?",
    "Find the distance between the points $({a}, {b})$ and $({k}, {p})$.",
    "An arithmetic sequence begins with {a}, {a2}. What is its term number {n}?",
)

VERBS = (
    "find",
    "count",
    "remove",
    "sort",
    "reverse",
    "check",
    "sum up",
    "print",
    "merge",
    "split",
    "replace",
    "group",
    "filter",
    "compare",
    "convert",
)
OBJECTS = (
    "all even numbers in a list",
    "the vowels of a string",
    "duplicate elements of a list",
    "the words of a sentence by length",
    "the keys of a dictionary by value",
    "the digits of an integer",
    "the largest element of each row of a matrix",
    "two sorted lists",
    "the characters that occur only once in a string",
    "negative numbers in a tuple",
    "nested lists",
    "the prime numbers below n",
    "a list of dates",
    "the lines of a text file",
    "pairs of numbers with a given sum",
    "palindromes in a list of words",
    "the elements at odd positions",
    "temperatures from Celsius to Fahrenheit",
    "overlapping intervals",
    "the longest run of equal elements",
    "anagrams in a list of strings",
    "the columns of a CSV file",
    "the nodes of a binary tree",
    "Roman numerals",
    "the common elements of three lists",
    "spaces at the ends of every string",
)
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C++", "SQL", "Bash")
FUNCTIONS = (
    ("is_leap_year(year: int) -> bool", "Return True if the year is a leap year."),
    ("count_words(text: str) -> dict", "Return how often each word occurs in the text."),
    (
        "running_total(numbers: List[int]) -> List[int]",
        "Return a list of the sums of all numbers up to each position.",
    ),
    ("second_largest(numbers: List[int]) -> int", "Return the second largest number of the list."),
    ("caesar(text: str, shift: int) -> str", "Shift each letter of the text by the given number of places."),
    ("flatten(items: list) -> list", "Turn a list of lists into one list, in the same order."),
    ("is_perfect(n: int) -> bool", "Return True if n equals the sum of its proper divisors."),
    ("dot_product(a: List[float], b: List[float]) -> float", "Return the dot product of two vectors."),
    ("to_binary(n: int) -> str", "Return the binary digits of n as a string, without a prefix."),
    ("chunk(items: list, size: int) -> List[list]", "Cut a list into pieces of the given size."),
    ("longest_word(words: List[str]) -> str", "Return the longest of the words; the first one of several."),
    ("fizz_buzz(n: int) -> List[str]", "Return the numbers up to n as strings, with Fizz, Buzz and FizzBuzz."),
    ("transpose(matrix: List[List[int]]) -> List[List[int]]", "Return the transpose of the matrix."),
    ("most_frequent(items: list) -> object", "Return the element that occurs most often."),
    ("is_balanced(text: str) -> bool", "Return True if all round brackets of the text are closed in order."),
    ("power_set(items: list) -> List[list]", "Return all subsets of the items."),
    ("digit_sum(n: int) -> int", "Return the sum of the decimal digits of n."),
    ("binary_search(items: List[int], x: int) -> int", "Return the position of x in a sorted list, or -1."),
    ("rotate(items: list, k: int) -> list", "Rotate the list to the right by k places."),
    ("compress(text: str) -> str", "Replace runs of a letter by the letter and the length of the run."),
    ("matrix_sum(matrix: List[List[int]]) -> int", "Return the sum of all entries."),
    ("collatz(n: int) -> List[int]", "Return the Collatz sequence that begins with n and ends with 1."),
    ("missing_number(numbers: List[int]) -> int", "Return the number from 0 to n that is not in the list."),
    ("title_case(text: str) -> str", "Make the first letter of each word a capital one."),
)

ARGUMENTS = (
    ("items: List[int]", "List[int]"),
    ("numbers: List[float]", "float"),
    ("text: str", "str"),
    ("words: List[str]", "List[str]"),
    ("n: int", "int"),
    ("values: dict", "list"),
    ("a: List[int], b: List[int]", "bool"),
    ("text: str, k: int", "List[str]"),
)
REMARKS = (
    "If there is nothing to do, return an empty result.",
    "Raise a ValueError if the input is empty.",
    "The order of the elements is kept.",
    "Upper and lower case letters are the same.",
    "The input is not changed.",
    "It is guaranteed that there is exactly one solution.",
    "Use a loop, not recursion.",
    "Numbers may be negative.",
)

TOPICS = listed(
    "photosynthesis|the French Revolution|black holes|a healthy breakfast|learning to play the guitar|"
    "climate change|the Roman Empire|remote work|a trip to Japan|electric cars|the human heart|saving money|"
    "the water cycle|artificial intelligence|growing tomatoes|time management|the Moon landing|public speaking|"
    "vaccines|a small business|gravity|the Great Wall of China|meditation|renewable energy|the stock market|"
    "baking bread|a job interview|Shakespeare|the ocean|friendship|volcanoes|social media|democracy|a new puppy|"
    "cloud computing|the immune system|a birthday party|online shopping|the Renaissance|sleep|earthquakes|"
    "writing a novel|a marathon|recycling|quantum mechanics|a visit to the museum|the internet|chess|inflation|"
    "bees|space travel|a vegetarian diet|the Cold War|DNA|loneliness|a lost key|a rainy day|an old lighthouse|"
    "a robot that dreams|a teacher and her students|a garden in winter|the first day at school|coffee|"
    "music and memory|traffic in big cities|a library that never closes|supply and demand|"
    "the theory of evolution|machine learning|databases|a mountain village|public transport",
    between="|",
)
READERS = ("a child", "a beginner", "my grandmother", "a college student", "busy people", "a friend", "experts")
FORMS = (
    "Write a short story about {topic}.",
    "Explain {topic} to {reader}.",
    "What are the advantages and disadvantages of {topic}?",
    "Write a poem about {topic}.",
    "Give me five tips on {topic}.",
    "Write an email to {reader} about {topic}.",
    "What should everyone know about {topic}?",
    "Write a blog post about {topic} for {reader}.",
    "Can you summarize what is known about {topic} in three sentences?",
    "Describe {topic} as if you had seen it for the first time.",
    "I want to know more about {topic}. Where should I start?",
    "Write a dialogue between {name} and {name2} about {topic}.",
    "What are common mistakes that people make with {topic}?",
    "How has {topic} changed over the last hundred years?",
    "Make a list of ten questions about {topic} for {reader}.",
    "Pretend to be a historian and answer this: why does {topic} matter?",
    "Compare {topic} with {topic2}.",
    "Write a speech of two minutes about {topic}.",
    "What is the connection between {topic} and {topic2}?",
    "Help me plan a lesson on {topic} for {reader}.",
    "Write a product description that mentions {topic}.",
    "Is it true that {topic} is overrated? Argue for both sides.",
    "You are a doctor. {name} asks you about {topic}. What do you say?",
    "Suggest three titles for an article on {topic}, and write its first paragraph.",
    "What would the world be like without {topic}?",
)


def sums(draw: random.Random) -> str:
    """A problem of numbers, in words or in symbols."""
    name, name2, name3 = draw.sample(NAMES, 3)
    thing, thing2 = draw.sample(THINGS, 2)
    a, n = draw.randint(3, 60), draw.randint(40, 600)
    template = draw.choice(SUMS if draw.random() < 0.75 else EXERCISES)
    return (
        template.format(
            name=name,
            name2=name2,
            name3=name3,
            thing=thing,
            thing2=thing2,
            place=draw.choice(PLACES),
            vehicle=draw.choice(VEHICLES),
            containers=draw.choice(CONTAINERS),
            a=a,
            a2=a + draw.randint(2, 9),
            b=draw.randint(3, 40),
            n=n,
            n2=draw.randint(40, 600),
            k=draw.randint(2, 9),
            p=draw.randint(2, 25),
            q=draw.randint(2, 25),
            h=draw.randint(2, 9),
            h2=draw.randint(2, 9),
            d=draw.randint(3, 7),
            d2=draw.randint(10, 20),
            w=draw.randint(2, 12),
            s=draw.randrange(30, 80, 5),
            s2=draw.randrange(30, 80, 5),
            pct=draw.randrange(10, 80, 5),
        )
        + REASONING
    )


def function(draw: random.Random) -> tuple[str, str]:
    """The head of a function, and what it does."""
    verb, what, (arguments, result) = draw.choice(VERBS), draw.choice(OBJECTS), draw.choice(ARGUMENTS)
    name = "_".join([*verb.split(), *[word for word in what.lower().split() if word.isalpha() and len(word) > 3][:2]])
    remarks = " ".join(draw.sample(REMARKS, draw.randint(0, 2)))
    return f"{name}({arguments}) -> {result}", f"{verb.capitalize()} {what}. {remarks}".strip()


def programs(draw: random.Random) -> str:
    """A small program, asked for in words or by the head of a function."""
    if draw.random() < 0.4:
        head, words = draw.choice(FUNCTIONS) if draw.random() < 0.1 else function(draw)
        return (
            "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
            f'from typing import List\n\n\ndef {head}:\n    """ {words}\n    """\n```'
        )
    verb, what, language = draw.choice(VERBS), draw.choice(OBJECTS), draw.choice(LANGUAGES)
    return draw.choice(
        (
            f"Write a function to {verb} {what}.",
            f"Write a {language} function to {verb} {what}.",
            f"Write a {language} program that can {verb} {what}, and explain how it works.",
            f"How do I {verb} {what} in {language}?",
        )
    )


def chat(draw: random.Random) -> str:
    """What people ask an assistant for."""
    topic, topic2 = draw.sample(TOPICS, 2)
    name, name2 = draw.sample(NAMES, 2)
    return draw.choice(FORMS).format(topic=topic, topic2=topic2, reader=draw.choice(READERS), name=name, name2=name2)


KINDS: tuple[Kind, ...] = (sums, programs, chat)


def prompts(seed: int = 0, kinds: Sequence[Kind] = KINDS, group: str = "template") -> Iterator[dict[str, Any]]:
    """Rows of `dataset`, `index` and `prompt`, each kind in turn, none twice, as good as without end."""
    draw, seen = random.Random(seed), set()
    for index in count():
        for kind in kinds:
            prompt = kind(draw)
            while prompt in seen:
                prompt = kind(draw)
            seen.add(prompt)
            # Of its kind: every twentieth is held out, and lines would hold out some kinds and not others.
            yield {"dataset": f"{group}-{kind.__name__}", "index": index, "prompt": prompt}


def write_prompts(
    description: str, source: Callable[..., Iterator[dict[str, Any]]], *, takes_files: bool = False
) -> None:
    """The command line of such a script: so many prompts of `source`, which takes a seed and, before it, files if they
    are named, as lines of JSON."""
    parser = argparse.ArgumentParser(description=description)
    if takes_files:
        parser.add_argument("files", nargs="+")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--output", default="prompts.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    given = [arguments.files] if takes_files else []
    lines = [json.dumps(row) for row in islice(source(*given, arguments.seed), arguments.num_prompts)]
    Path(arguments.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("wrote", len(lines), "prompts to", arguments.output)


if __name__ == "__main__":
    write_prompts(__doc__.splitlines()[0], prompts)
