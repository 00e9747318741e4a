"""A reward function: short answers that say the expected word are good."""


def score(prompts: list[str], responses: list[str], expected: list[str], **_: object) -> list[float]:
    """One number for each response. `expected` is a field of the prompt records."""
    found = (word.lower() in text.lower() for word, text in zip(expected, responses, strict=True))
    return [float(hit) - 0.01 * len(text.split()) for hit, text in zip(found, responses, strict=True)]
