"""The reward of the job grpo.yaml."""


def share(prompts: list[str], responses: list[str], **fields: object) -> list[float]:
    """Of vowels in each response's characters."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in responses]
