"""Prompts of the kinds that an assistant is asked: writing, roles, riddles, extraction, science, society.

python examples/assistant_prompts.py --num-prompts 1000 --output prompts.jsonl
dspark-hf data --prompts prompts.jsonl --exclude held-out.jsonl --output responses.jsonl

`template_prompts.py` has sums, programs and short questions; these are longer, and many of them bring a text along.
None is of a benchmark.
"""

import random
from collections.abc import Iterator
from typing import Any

import template_prompts
from template_prompts import NAMES, READERS, THINGS, TOPICS, Kind, listed, write_prompts

PLACES = listed(
    "Lisbon|Kyoto|Iceland|Cape Town|Peru|Vienna|a small fishing village|the Sahara|New Zealand|Istanbul|Patagonia|"
    "Montreal|Rome|the Alps|Vietnam|Edinburgh|Morocco|Bali|the Amazon|Prague|Kenya|a remote island|Chicago|Seoul",
    between="|",
)
ROLES = listed(
    "a travel guide|a chef|a physics professor|a fitness trainer|a career counselor|a detective|a museum curator|"
    "a pirate captain|a gardener|a financial advisor|a journalist|a librarian|a medieval knight|a psychologist|"
    "a startup founder|a lawyer|an astronaut|a sports commentator|a wise old fisherman|a software architect|"
    "a history teacher|a stand-up comedian|a nutritionist|a time traveler|an interior designer|a poet|a biologist|"
    "a talking cat|an economist|a philosopher of ancient Greece|a tour bus driver|a project manager|a space robot",
    between="|",
)
FEELINGS = listed(
    "cheerful|formal|humorous|melancholic|persuasive|dramatic|calm|sarcastic|inspiring|simple|poetic",
    between="|",
)
PIECES = listed(
    "a blog post|a short story|a letter|a product review|a speech|a news article|an advertisement|a diary entry|"
    "a fairy tale|an essay|a poem|a song text|a scene of a play|an opening paragraph of a novel|a press release|"
    "a social media post|a cover letter|a movie review|an invitation|a toast",
    between="|",
)
EVENTS = listed(
    "a wedding|a job application|a delayed order|a school trip|a team meeting|a broken heating|a charity run|"
    "a product launch|a missed deadline|a change of address|a conference talk|a birthday|a rent increase|"
    "a promotion|a lost suitcase|a software update|a neighborhood party|a book club|an internship|a resignation",
    between="|",
)
SCIENCE = listed(
    "photosynthesis|plate tectonics|the greenhouse effect|osmosis|natural selection|Newton's third law|entropy|"
    "the periodic table|nuclear fission|electromagnetic induction|cell division|the Doppler effect|acids and bases|"
    "the theory of relativity|antibiotics|the nitrogen cycle|superconductors|refraction of light|protein synthesis|"
    "neural networks|Ohm's law|black holes|catalysts|the pH scale|buoyancy|redox reactions|mitochondria|tides|"
    "hormones|radioactive decay|the carbon cycle|friction|sound waves|genetic engineering|stem cells|batteries|"
    "semiconductors|the Krebs cycle|gravitational waves|erosion|combustion|the ozone layer|vaccines|diffusion",
    between="|",
)
TECHNOLOGY = listed(
    "a wind turbine|a water filter for a village|a bicycle path across a river|a small satellite|a greenhouse|"
    "an electric bus line|a dam|a weather station|a robot arm|a search engine|a spam filter|a recommendation system|"
    "a heat pump|an irrigation system|a tunnel|a mobile app for a library|a noise barrier|a desalination plant",
    between="|",
)
SOCIETY = listed(
    "the Industrial Revolution|the Silk Road|the fall of the Berlin Wall|the printing press|feudalism|globalization|"
    "women's suffrage|the Enlightenment|colonialism|the Olympic Games|urbanization|minimum wages|taxes|free trade|"
    "trade unions|censorship|stoicism|utilitarianism|existentialism|impressionism|jazz|Greek tragedy|propaganda|"
    "the United Nations|immigration|unemployment|interest rates|monopolies|confirmation bias|the sunk cost fallacy|"
    "the prisoner's dilemma|public health|universal basic income|the Black Death|the Magna Carta|the Ottoman Empire|"
    "Buddhism|tipping in restaurants|table manners in France|business customs in Germany|advertising|rhetoric|"
    "plagiarism|time and memory|justice|happiness|leadership|the Nile in ancient Egypt|the Aztecs|railways",
    between="|",
)
ASPECTS = listed(
    "its causes and its consequences|its main ideas|its effect on everyday life|who shaped it|its critics|its history|"
    "how it differs from country to country|three examples|what we can learn from it|its role in education",
    between="|",
)
COMPANIES = listed(
    "Novaris|Bluefield|Kestrel|Oakline|Solara|Tantum|Verdana|Quillon|Marrow & Sons|Polaris|Lumen|Arctia",
    between="|",
)
PRODUCTS = listed(
    "a pair of headphones|a coffee machine|a vacuum cleaner|a tent|an office chair|a smartwatch|a blender|a suitcase|"
    "a novel|a restaurant|a hotel|a movie|a video game|a phone|a language course",
    between="|",
)
GOOD = listed(
    "It works perfectly and looks great.|I would buy it again at once.|The quality is better than I expected.|"
    "The service was friendly and quick.|Everything was just right.|Worth every cent.",
    between="|",
)
BAD = listed(
    "It broke after two days.|I am very disappointed.|Far too expensive for what it is.|Nobody answered my emails.|"
    "The instructions make no sense.|I wanted to like it, but I could not.",
    between="|",
)
MIXED = listed(
    "It is okay, nothing special.|Good idea, but not well made.|Some parts were great, others dull.|"
    "It does what it should, but it is slow.|Fine for the price.|I have mixed feelings about it.",
    between="|",
)
FLAWED = listed(
    "me and him was going to the market yesterday|their is to many cars on the street|she dont know where is the book|"
    "the informations was not usefull|i has finished my homeworks before he come|we was suprised by the wether|"
    "he runned very quick to catched the bus|its a honor to met you|the childs is playing in they're room|"
    "if i would have knew that i will not buy it|the team are happy becouse it winned|everybody have there own taste",
    between="|",
)
CITIES = (
    ("Paris", "France", "French"),
    ("Ottawa", "Canada", "English and French"),
    ("Nairobi", "Kenya", "Swahili and English"),
    ("Lima", "Peru", "Spanish"),
    ("Oslo", "Norway", "Norwegian"),
    ("Hanoi", "Vietnam", "Vietnamese"),
    ("Cairo", "Egypt", "Arabic"),
    ("Warsaw", "Poland", "Polish"),
    ("Tokyo", "Japan", "Japanese"),
    ("Athens", "Greece", "Greek"),
)
GROUPS = listed(
    "apple, pear, carrot, plum|chair, table, sofa, spoon|violin, drum, guitar, cello|red, blue, loud, green|"
    "Mars, Venus, Moon, Saturn|run, jump, sleep, walk|nurse, surgeon, patient, dentist|gold, silver, wood, copper|"
    "sparrow, eagle, bat, robin|January, Monday, March, July|river, lake, mountain, pond|happy, sad, angry, tall",
    between="|",
)
FACTS = (
    "{x} is taller than {y}. {y} is taller than {z}. Who is the shortest?",
    "{x} is the mother of {y}, and {y} is the sister of {z}. How are {x} and {z} related?",
    "{x} finished the race before {y} but after {z}. In what order did they finish?",
    "All of {x}'s friends like {thing}. {y} does not like {thing}. Is {y} a friend of {x}?",
    "{x} has {n} brothers, and each of them has {k} sisters. How many sisters does {x} have, if {x} is a girl?",
    "A room has {k} corners. In each corner sits a cat, and each cat sees {k2} other cats. How many cats are there?",
    "{x} walks {n} steps north, {k} steps east and {n} steps south. Where is {x} now, seen from the start?",
    "If it takes {k} machines {k} minutes to make {k} {thing}, how long do {n} machines need for {n} {thing}?",
    "Some {thing} are red. Everything red is old. Does it follow that some {thing} are old?",
    "{x} says that {y} always lies. {y} says that {x} is telling the truth. Can both be right?",
    "Yesterday was {k} days before Friday. What day is it today?",
    "{x} goes to the same shop every morning but never buys anything. What could be the reasons?",
    "A box holds {n} {thing} of two colors. How many must {x} take out to be sure of two of one color?",
    "The lights in {x}'s kitchen go out whenever {y} uses the microwave. What may be going on?",
    "{x} is {n} years old, and {y} is half as old. How old will {y} be when {x} is {m}?",
)


def writing(draw: random.Random) -> str:
    topic, piece, place = draw.choice(TOPICS), draw.choice(PIECES), draw.choice(PLACES)
    name, event, tone = draw.choice(NAMES), draw.choice(EVENTS), draw.choice(FEELINGS)
    limit = draw.choice(("", f" Keep it under {draw.randrange(50, 300, 50)} words.", " Give it a title.", ""))
    return (
        draw.choice(
            (
                f"Write {piece} about {topic} in a {tone} tone.",
                f"Write {piece} about a journey to {place}. Mention the food, the people and the sights.",
                f"Draft a {tone} email to {draw.choice(READERS)} about {event}.",
                f"Draft a letter to {name} about {event}. Thank for the patience and propose a next step.",
                f"Describe {place} in winter, so that one can smell and hear it.",
                f"Write {piece} that begins with the words: Nobody in {place} had expected {name} to come back.",
                f"Describe a character named {name} who works as {draw.choice(ROLES)}, and who has a secret.",
                f"Make an outline of {piece} that compares {topic} with {draw.choice(TOPICS)}.",
                f"Think of five headlines for an article on {topic}, each in another style.",
                f"Convince a friend who is afraid of {event} to come along. Write it as {piece}.",
                f"Rewrite this in a {tone} tone: The meeting about {topic} has been moved to Thursday.",
                "Correct the grammar and spelling of this text, and list what you changed: "
                + ". ".join(draw.sample(FLAWED, 3))
                + ".",
            )
        )
        + limit
    )


def roles(draw: random.Random) -> str:
    role, role2 = draw.sample(ROLES, 2)
    topic, name = draw.choice((*TOPICS, *SCIENCE, *SOCIETY)), draw.choice(NAMES)
    return draw.choice(
        (
            f"You are {role}. Explain {topic} to your visitors.",
            f"Act as {role}. My first question: what should I know about {topic}?",
            f"Pretend to be {role} who meets {role2}. What do you talk about?",
            f"From now on, answer as {role} would, in no more than five sentences. What do you think of {topic}?",
            f"Imagine that you are {role} and that {name} asks for advice on {draw.choice(EVENTS)}. Reply.",
            f"I want you to play {role}. Stay in your role. I say: I am not sure that {topic} is for me.",
            f"As {role}, describe a typical day of yours in {draw.choice(PLACES)}.",
            f"Take the part of {role} and write down your opinion on {topic}, with two arguments and a joke.",
            f"You are an old {draw.choice(THINGS)[:-1]} in the attic of a house. Tell your story.",
            f"Let us have a conversation. You are {role}, I am {role2}. You begin, with a question on {topic}.",
        )
    )


def riddles(draw: random.Random) -> str:
    x, y, z = draw.sample(NAMES, 3)
    k = draw.randint(2, 8)
    n = draw.randint(3, 40)
    numbers = {"k": k, "k2": k - 1, "n": n, "m": n + draw.randint(5, 30)}
    if draw.random() < 0.2:
        words = draw.choice(GROUPS).split(", ")
        draw.shuffle(words)
        return f"Which of these words does not fit, and why? {', '.join(words)}"
    facts = draw.choice(FACTS).format(x=x, y=y, z=z, thing=draw.choice(THINGS), **numbers)
    return facts + draw.choice(("", " Explain.", " Explain your reasoning step by step.", " Answer in one sentence."))


def _reviews(draw: random.Random) -> str:
    product = draw.choice(PRODUCTS)
    kinds = draw.sample((GOOD, BAD, MIXED), 3)
    lines = "\n".join(f"{i}. {' '.join(draw.sample(kind, 2))}" for i, kind in enumerate(kinds, 1))
    scale = draw.choice(("from 1 to 5", "as positive, neutral or negative", "from 0 to 10"))
    form = draw.choice(("", " Answer as a JSON list.", " Give one line for each.", " Say why."))
    return f"Here are reviews of {product}. Rate each of them {scale}.{form}\n{lines}"


def _figures(draw: random.Random) -> str:
    names = draw.sample(COMPANIES, 3)
    lines = "\n".join(
        f"{name}: revenue {draw.randint(10, 900)} million, profit {draw.randint(1, 99)} million, "
        f"{draw.randint(50, 9000)} employees, led by {draw.choice(NAMES)}"
        for name in names
    )
    question = draw.choice(
        (
            "Which company has the highest profit, and who leads it?",
            "Put the companies in order of their revenue.",
            "Make a table of the companies, with a column for each figure.",
            "Write the data as JSON.",
            "What is the total number of employees?",
        )
    )
    return f"{question}\n{lines}"


def _entities(draw: random.Random) -> str:
    (city, country, language), (city2, country2, _) = draw.sample(CITIES, 2)
    name, name2 = draw.sample(NAMES, 2)
    company = draw.choice(COMPANIES)
    text = (
        f"On {draw.randint(1, 28)} May, {name} flew from {city} to {city2} to meet {name2} of {company}. In {country} "
        f"they speak {language}, so {name2} had hired an interpreter. The talks in {country2} went on for "
        f"{draw.randint(2, 9)} days and ended with a contract over ${draw.randint(2, 90)} million."
    )
    task = draw.choice(
        (
            "List all persons, places and organizations in this text.",
            "Extract names, dates and amounts from this text as JSON.",
            "Summarize this text in one sentence.",
            "Which countries and capitals does this text name? Answer in a table.",
            "How often does the word 'to' appear in this text? Then rewrite the text in the present tense.",
            "Write three questions that this text answers, with the answers.",
        )
    )
    return f"{task}\n{text}"


def extraction(draw: random.Random) -> str:
    return draw.choice((_reviews, _figures, _entities))(draw)


def science(draw: random.Random) -> str:
    thing, thing2 = draw.sample(SCIENCE, 2)
    return draw.choice(
        (
            f"What is meant by {thing}, and what does it have to do with {thing2}?",
            f"Explain {thing} step by step. Which quantities are involved?",
            f"Who discovered {thing}, and how?",
            f"Describe an experiment that shows {thing} at school. List the material and the steps.",
            f"What are the differences between {thing} and {thing2}? Give an example of each.",
            f"Outline the main stages of {thing}, and say why each of them matters.",
            f"What would happen if there were no {thing}?",
            f"You are asked to plan {draw.choice(TECHNOLOGY)}. Describe the main parts, the costs and the risks.",
            f"Which factors decide whether {draw.choice(TECHNOLOGY)} works well? Explain each of them.",
            f"A student says: '{thing} is only a theory.' What do you reply?",
            f"Write a short lexicon entry on {thing}, with a formula or an equation if there is one.",
            f"What are common misunderstandings about {thing}? Correct them.",
        )
    )


def society(draw: random.Random) -> str:
    thing, thing2 = draw.sample(SOCIETY, 2)
    return draw.choice(
        (
            f"Discuss {thing}: {draw.choice(ASPECTS)}.",
            f"How did {thing} influence {thing2}? Name three ways.",
            f"What are the main principles of {thing}? Give an example for each.",
            f"Compare {thing} and {thing2}, and state which of them matters more today.",
            f"Create a lesson plan on {thing} for {draw.randint(2, 5)} lessons of 45 minutes.",
            f"List five books or films on {thing}, each with a sentence about it.",
            f"Why is {thing} still discussed? Consider {draw.choice(ASPECTS)}.",
            f"What would a critic say about {thing}, and how could one answer?",
            f"Explain the connection between {thing} and {draw.choice(TOPICS)}.",
            f"Give an overview of {thing}, with the most important dates and persons.",
            f"Suggest {draw.randint(3, 6)} activities by which children can learn about {thing}.",
        )
    )


KINDS: tuple[Kind, ...] = (writing, roles, riddles, extraction, science, society)


def prompts(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows as those of `template_prompts.prompts`."""
    return template_prompts.prompts(seed, KINDS, "assistant")


if __name__ == "__main__":
    write_prompts(__doc__.splitlines()[0], prompts)
