"""OpenAI's categories of objectionable texts, and the labels of classifiers that stand for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CATEGORIES = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
# Labels of public classifiers, in lower case with one kind of mark: OpenAI's own short ones, and Jigsaw's.
_ALIASES: Mapping[str, str] = {
    "s": "sexual",
    "h": "hate",
    "v": "violence",
    "hr": "harassment",
    "sh": "self-harm",
    "s3": "sexual/minors",
    "h2": "hate/threatening",
    "v2": "violence/graphic",
    "toxic": "harassment",
    "toxicity": "harassment",
    "severe toxic": "harassment",
    "severe toxicity": "harassment",
    "insult": "harassment",
    "threat": "harassment/threatening",
    "identity hate": "hate",
    "identity attack": "hate",
    "hate speech": "hate",
    "obscene": "sexual",
    "sexual explicit": "sexual",
    "nsfw": "sexual",
    "suicide": "self-harm",
    "violent": "violence",
}
_THRESHOLD = 0.5


def categories_of(labels: Sequence[str]) -> dict[int, str]:
    """The category of each label that stands for one, by its place."""
    found = {}
    for place, label in enumerate(labels):
        plain = " ".join(label.lower().replace("_", " ").replace("-", " ").replace("/", " ").split())
        category = _ALIASES.get(plain) or next((each for each in CATEGORIES if _plain(each) == plain), None)
        if category is not None:
            found[place] = category
    return found


def moderated(categories: Mapping[int, str], scores: Sequence[float]) -> dict[str, Any]:
    """A result of OpenAI's: the highest score of each category; one that no label stands for has 0."""
    highest = dict.fromkeys(CATEGORIES, 0.0)
    for place, category in categories.items():
        highest[category] = max(highest[category], scores[place])
    flags = {category: score >= _THRESHOLD for category, score in highest.items()}
    judged = set(categories.values())
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": highest,
        "category_applied_input_types": {category: ["text"] if category in judged else [] for category in CATEGORIES},
    }


def _plain(category: str) -> str:
    return category.replace("-", " ").replace("/", " ")
