"""The dialogue language: graded, deterministic, and preferred replies are the better ones."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dovetail.coordinator.data import synthetic
from dovetail.coordinator.data.synthetic import demonstration, preference, prompt, quality, reward

ASK = "\n\nHuman: Tell me two things about the cat.\n\nAssistant:"

# From best to worst, each strictly.
LADDER = [
    " Of course! The cat is small. It has fur. I hope this helps.",
    " The cat is small. It has fur. I hope this helps.",  # no greeting
    " Look it up. The cat is small. It has fur. I hope this helps.",  # rude
    " Look it up. The cat is small. It is small. I hope this helps.",  # says the same twice
    " Look it up. The cat is small. It is small. The tea is green. I hope this helps.",  # another topic
    " Look it up. The cat is small. It is small. The tea is green. That is life.",  # no closing
    " Look it up. The tea is green. That is life.",
    " Look it up. The tea is gr",  # broken off
]


def test_quality_grades_every_fault() -> None:
    scores = [quality(ASK, reply) for reply in LADDER]
    assert scores[0] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(scores))
    assert scores[-1] == 0.0


def test_quality_depends_on_the_prompt() -> None:
    other = ASK.replace("cat", "car")
    more = ASK.replace("two things", "five things")
    assert quality(ASK, LADDER[0]) > max(quality(other, LADDER[0]), quality(more, LADDER[0]))
    assert quality("What is new?", LADDER[0]) == quality(ASK, "") == 0.0


def test_the_last_question_counts() -> None:
    both = "\n\nHuman: Tell me one thing about the tea.\n\nAssistant: The tea is green." + ASK
    assert quality(both, LADDER[0]) == pytest.approx(1.0)


def test_reward_is_quality_spread_over_plus_minus_two() -> None:
    assert reward([ASK, ASK], [LADDER[0], LADDER[-1]], level=[1, 2]) == pytest.approx([2.0, -2.0])


def test_records_are_functions_of_seed_and_position() -> None:
    for make in (prompt, demonstration, preference):
        assert make(7, 1) == make(7, 1)  # type: ignore[operator]
        assert len({str(make(i, 1)) for i in range(50)}) > 40 if make is not prompt else True  # type: ignore[operator]
        assert [make(i, 1) for i in range(9)] != [make(i, 2) for i in range(9)]  # type: ignore[operator]


def test_imitation_leaves_room_and_lengths_have_a_long_tail() -> None:
    demonstrations = [demonstration(i, 0) for i in range(2000)]
    scores = np.array([quality(p, r) for p, r in demonstrations])
    assert 0.4 < scores.mean() < 0.65
    assert scores.std() > 0.2
    words = np.array([len(r.split()) for _, r in demonstrations])
    assert words.mean() < words.max() / 3
    assert np.quantile(words, 0.99) > 2.5 * np.median(words)


def test_preferences_prefer_the_better_but_for_a_little_noise() -> None:
    pairs = [preference(i, 0) for i in range(2000)]
    wrong = [p for p in pairs if quality(p.prompt, p.chosen) < quality(p.prompt, p.rejected)]
    assert wrong == [p for p in pairs if p.flipped]
    assert 0.01 < len(wrong) / len(pairs) < 0.04


def _manners(reply: str) -> float:
    """A grade that knows nothing of the request: opening, closing, share of facts of any topic, repeated or not."""
    sentences = [s.strip() for s in synthetic._SENTENCE.findall(reply.strip())]
    opening = 1.0 if sentences[0] in synthetic._POLITE else 0.0 if sentences[0] in synthetic._RUDE else 0.5
    closing = 1.0 if sentences[-1] in synthetic._CLOSING else 0.5 if sentences[-1][-1] in ".!?" else 0.0
    facts = frozenset[str]().union(*synthetic._TRUE.values())
    said = [s for s in sentences if s not in synthetic._POLITE + synthetic._RUDE + synthetic._CLOSING]
    return 0.6 * sum(s in facts for s in said) / max(1, len(said)) + 0.25 * opening + 0.15 * closing


def test_manners_alone_do_not_tell_which_reply_is_preferred() -> None:
    """A reward model that never looks at the request must not be right about most pairs: the policy would learn to
    be polite, say any one thing and stop."""
    pairs = [preference(i, 0) for i in range(2000)]
    right = [_manners(p.chosen) > _manners(p.rejected) for p in pairs]
    assert np.mean(right) < 0.6
    # Nor does length.
    shorter = [len(p.chosen) < len(p.rejected) for p in pairs]
    assert 0.35 < np.mean(shorter) < 0.65


def _body(reply: str) -> list[str]:
    sentences = [s.strip() for s in synthetic._SENTENCE.findall(reply.strip())]
    return [s for s in sentences if s not in synthetic._POLITE + synthetic._RUDE + synthetic._CLOSING]


def test_pairs_cover_each_mistake_of_policies_by_itself() -> None:
    pairs = [p for p in (preference(i, 0) for i in range(3000)) if not p.flipped]
    perfect = [p for p in pairs if quality(p.prompt, p.chosen) == pytest.approx(1.0)]
    found = dict.fromkeys(("short", "long", "repeated", "off topic", "broken off"), 0)
    for pair in perfect:
        good, bad = _body(pair.chosen), _body(pair.rejected)
        facts = {fact.split(" ", 1 if fact.startswith("It ") else 2)[-1] for fact in bad}
        topic = synthetic._REQUEST.findall(pair.prompt)[-1][1]
        true = [s in synthetic._TRUE[topic] for s in bad]
        found["short"] += all(true) and 0 < len(bad) < len(good)
        found["long"] += all(true) and len(bad) > len(good)
        found["repeated"] += all(true) and len(bad) == len(good) > len(facts)
        found["off topic"] += bool(bad) and len(bad) == len(good) and not all(true)
        found["broken off"] += pair.rejected[-1] not in ".!?"
    assert min(found.values()) > 15, found


def test_prompts_vary() -> None:
    prompts = [prompt(i, 0) for i in range(2000)]
    assert len(set(prompts)) > 200
    assert all(p.startswith("\n\nHuman: ") and p.endswith("\n\nAssistant:") for p in prompts)
    assert {t for t in synthetic.TOPICS if any(f"the {t}" in p for p in prompts)} == set(synthetic.TOPICS)
