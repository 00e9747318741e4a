"""A small dialogue language in which the quality of a reply is known.

A prompt asks for a number of facts about a topic ("Tell me two things about the cat."). A good reply opens politely,
says as many true facts about that topic as were asked for, none twice, and closes politely. Imaginary authors write the
replies with a care from 0 to 1. With less care, a reply is more often rude, off the topic, vague, repetitive and too
long. So a policy that imitates all authors can improve much. The best reply depends on the prompt, and lengths have a
long tail. `quality` is the ground truth. A seed determines everything."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.coordinator.data.text.chat_template import ASSISTANT, HUMAN

# Six true facts about each topic, in short common words. The topics share many words.
FACTS: dict[str, tuple[str, ...]] = {
    "cat": ("is small", "is soft", "has fur", "can run", "can sleep", "likes milk"),
    "dog": ("is loud", "has fur", "can run", "can play", "likes meat", "likes walks"),
    "bird": ("is small", "is light", "has wings", "can fly", "can sing", "likes seeds"),
    "horse": ("is big", "is fast", "can run", "can jump", "likes grass", "likes walks"),
    "bread": ("is soft", "is brown", "is good", "needs wheat", "needs heat", "goes with milk"),
    "tea": ("is hot", "is green", "is good", "needs water", "needs heat", "goes with cake"),
    "car": ("is big", "is fast", "is loud", "has wheels", "can turn", "needs power"),
    "river": ("is long", "is cold", "has fish", "can turn", "can rise", "needs rain"),
}
TOPICS = tuple(FACTS)
COUNTS = {1: "one thing", 2: "two things", 3: "three things", 5: "five things"}
_COUNT_WEIGHTS = (0.30, 0.35, 0.20, 0.15)

_ASK = (
    "Tell me {n} about the {t}.",
    "Can you tell me {n} about the {t}?",
    "Please say {n} about the {t}.",
    "I want to know {n} about the {t}.",
)
_POLITE = ("Of course!", "Sure, happy to help.", "Good question!", "Yes, with joy.")
_RUDE = ("Why ask me?", "Look it up.", "Not again.", "Go away.")
_VAGUE = ("It is hard to say.", "Some say so.", "Who can know?", "It is what it is.", "That is life.")
_CLOSING = ("I hope this helps.", "Ask me more any time.", "Have a nice day.")

_TRUE: dict[str, frozenset[str]] = {
    topic: frozenset(f"{subject} {fact}." for fact in facts for subject in ("It", f"The {topic}"))
    for topic, facts in FACTS.items()
}
_REQUEST = re.compile(rf"\b({'|'.join(COUNTS.values())}) about the ({'|'.join(TOPICS)})[.?]")
_ASKED = {words: n for n, words in COUNTS.items()}
_SENTENCE = re.compile(r"[^.!?]*[.!?]|[^.!?]+$")


@dataclass(frozen=True)
class Pair:
    """Two replies to a prompt. `flipped` marks label noise: the chosen reply is then the worse one."""

    prompt: str
    chosen: str
    rejected: str
    flipped: bool


def quality(prompt: str, reply: str) -> float:
    """The ground truth in [0, 1]: 0.6 F1(said, asked) + 0.25 politeness + 0.15 proper end.

    F1 combines precision and recall. Precision counts distinct true facts about the topic, at most as many as asked,
    over all sentences between opening and closing. Recall is the same count over the number asked. A rude opening
    scores 0, no opening 0.5 and a polite one 1. A closing sentence scores 1, another complete last sentence 0.5 and an
    incomplete one 0. A prompt that is not of this language gives 0."""
    requests = _REQUEST.findall(prompt)
    text = reply.strip()
    if not requests or not text:
        return 0.0
    asked, topic = _ASKED[requests[-1][0]], requests[-1][1]
    sentences = [s.strip() for s in _SENTENCE.findall(text)]
    politeness = 0.5
    if sentences[0] in _POLITE:
        politeness, sentences = 1.0, sentences[1:]
    elif sentences[0] in _RUDE:
        politeness, sentences = 0.0, sentences[1:]
    ending = 0.5 if text[-1] in ".!?" else 0.0
    if sentences and sentences[-1] in _CLOSING:
        ending, sentences = 1.0, sentences[:-1]
    facts = {s.split(" ", 1)[1] if s.startswith("It ") else s.split(" ", 2)[2] for s in sentences if s in _TRUE[topic]}
    hits = min(len(facts), asked)
    f1 = 2.0 * hits / (len(sentences) + asked)
    return 0.6 * f1 + 0.25 * politeness + 0.15 * ending


def qualities(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """`quality` of each response."""
    return [quality(p, r) for p, r in zip(prompts, responses, strict=True)]


def reward(prompts: list[str], responses: list[str], **fields: Any) -> list[float]:
    """`quality` as a reward function for `models.reward.function`, scaled to [-2, 2]."""
    return [4.0 * q - 2.0 for q in qualities(prompts, responses)]


def _prompt(rng: random.Random) -> tuple[str, str, int]:
    """A prompt with its topic and count. One in twelve is the second turn of a dialogue."""
    topic = rng.choice(TOPICS)
    asked = rng.choices(tuple(COUNTS), _COUNT_WEIGHTS)[0]
    before = ""
    if rng.random() < 1 / 12:
        other = rng.choice([t for t in TOPICS if t != topic])
        before = HUMAN + rng.choice(_ASK).format(n=COUNTS[1], t=other) + ASSISTANT + _reply(rng, other, 1, 0.9)
    ask = rng.choice(_ASK).format(n=COUNTS[asked], t=topic)
    return before + HUMAN + ask + ASSISTANT, topic, asked


def _reply(rng: random.Random, topic: str, asked: int, care: float) -> str:
    """The answer of an author with this care (0 to 1), with the leading space of the HH format."""
    lapse = 1.0 - care
    sentences: list[str] = []
    opening = rng.random()
    if opening < 0.1:
        pass
    elif opening < 0.1 + 0.9 * min(1.0, max(0.0, 1.5 * care - 0.25)):
        sentences.append(rng.choice(_POLITE))
    else:
        sentences.append(rng.choice(_RUDE))
    length = asked
    if rng.random() < lapse:  # it is too short, or too long with a long tail of lengths
        length = rng.randint(1, asked) if rng.random() < 0.5 else asked + 1 + min(int(rng.expovariate(0.3)), 14)
    # Facts keep their order, as in natural speech: what it is, what it has or can do, and what it likes or needs.
    unsaid = [FACTS[topic][i] for i in sorted(rng.sample(range(len(FACTS[topic])), min(length, len(FACTS[topic]))))]
    said: list[str] = []
    for i in range(length):
        slip = rng.random() < 0.7 * lapse
        kind = rng.random()
        if not slip and unsaid:
            fact = unsaid.pop(0)
            sentence = f"{'It' if i and rng.random() < 0.5 else f'The {topic}'} {fact}."
        elif kind < 0.2:
            other = rng.choice(TOPICS)
            sentence = f"The {other} {rng.choice(FACTS[other])}."
        elif kind < 0.5 and said:
            sentence = rng.choice(said)
        else:
            sentence = rng.choice(_VAGUE)
        said.append(sentence)
    sentences += said
    if rng.random() < min(1.0, 0.1 + care):
        sentences.append(rng.choice(_CLOSING))
    return " " + " ".join(sentences)


def _care(rng: random.Random) -> float:
    """The care of a random author. Half of the authors are careless, so that imitation alone is not good enough."""
    return min(1.0, max(0.0, rng.choice((0.1, 0.9)) + rng.uniform(-0.1, 0.1)))


def prompt(index: int, seed: int | str) -> str:
    """The index-th prompt, in HH format. It ends in "Assistant:"."""
    return _prompt(_rng("prompt", seed, index))[0]


def demonstration(index: int, seed: int | str) -> tuple[str, str]:
    """The index-th (prompt, reply), by an author of any care."""
    rng = _rng("demonstration", seed, index)
    text, topic, asked = _prompt(rng)
    return text, _reply(rng, topic, asked, _care(rng))


NOISE, MARGIN = 0.02, 0.3


def preference(index: int, seed: int | str) -> Pair:
    """The index-th pair of replies to a prompt. The better one is chosen. A fraction NOISE of the pairs is mislabelled.

    In one pair of four, two authors write the replies, whose quality differs by at least MARGIN. In the other three,
    one reply is the other one with one more mistake, of a kind that policies make (`_mistaken`). Only such pairs teach
    a reward model that each property counts by itself (how many facts, about what, none twice), because careless
    authors do everything badly."""
    rng = _rng("preference", seed, index)
    text, topic, asked = _prompt(rng)
    if rng.random() < 0.25:
        while True:
            replies = [_reply(rng, topic, asked, _care(rng)) for _ in range(2)]
            worse, better = sorted(replies, key=lambda reply: quality(text, reply))
            if quality(text, better) - quality(text, worse) >= MARGIN:
                break
    else:
        while True:
            better = _reply(rng, topic, asked, 1.0 if rng.random() < 0.8 else _care(rng))
            worse = _mistaken(rng, better, topic)
            if worse.strip() and quality(text, better) > quality(text, worse):
                break
    flipped = rng.random() < NOISE
    return Pair(text, worse if flipped else better, better if flipped else worse, flipped)


def _mistaken(rng: random.Random, reply: str, topic: str) -> str:
    """The reply with one more mistake. It has one fact too few or too many, a fact that is repeated, off the topic or
    vague, only facts off the topic, no opening or a rude one, or no closing, or it is cut off."""
    sentences = [s.strip() for s in _SENTENCE.findall(reply.strip())]
    opening = sentences[:1] if sentences[0] in _POLITE + _RUDE else []
    closing = sentences[-1:] if sentences[-1] in _CLOSING else []
    said = sentences[len(opening) : len(sentences) - len(closing)]
    at = rng.randrange(len(said)) if said else 0
    some = rng.choice((1, 1, 2, 3))

    def sentence(about: str, fact: str) -> str:
        return f"{rng.choice(('It', f'The {about}'))} {fact}."

    kind = rng.random()
    if kind < 0.2:
        del said[at : at + some]
    elif kind < 0.4:
        for _ in range(some):
            said.insert(rng.randint(1, max(1, len(said))), sentence(topic, rng.choice(FACTS[topic])))
    elif kind < 0.65:
        told = [fact for fact in FACTS[topic] if any(s.endswith(f" {fact}.") for s in said[:at] + said[at + 1 :])]
        if told:
            said[at] = sentence(topic, rng.choice(told))
    elif kind < 0.75 and said:
        other = rng.choice(TOPICS)
        said[at] = f"The {other} {rng.choice(FACTS[other])}."
    elif kind < 0.8:
        other = rng.choice([t for t in TOPICS if t != topic])
        facts = rng.sample(FACTS[other], len(FACTS[other]))
        said = [f"The {other} {fact}." for fact, _ in zip(facts, said, strict=False)]
    elif kind < 0.85 and said:
        said[at] = rng.choice(_VAGUE)
    elif kind < 0.92:
        opening = [rng.choice(_RUDE)] if rng.random() < 0.5 else []
    elif kind < 0.97:
        closing = []
    else:
        return reply[: rng.randint(2, len(reply) - 1)]
    return " " + " ".join(opening + said + closing)


def _rng(kind: str, seed: int | str, index: int) -> random.Random:
    """A random generator seeded by a string. Python hashes it with SHA-512, so it is the same everywhere."""
    return random.Random(f"{kind}/{seed}/{index}")
