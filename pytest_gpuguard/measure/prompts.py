"""The fixed texts that servers are asked to go on with: plain ones, so that an answer to nonsense proves nothing.

No two end in the same word: a model with tied random embeddings repeats the last one, and must not look as if it
ignored what it was asked.
"""

from __future__ import annotations

import random
from typing import Final

_PLACES: Final = ("harbour", "library", "station", "market", "school", "bakery", "museum", "mill")
_THINGS: Final = ("ships", "books", "trains", "apples", "letters", "loaves", "coins", "sacks", "lamps", "bricks")
_PEOPLE: Final = ("Anna", "Boris", "Chen", "Dalia", "Emeka", "Fatima", "Goran", "Hana", "Ivan", "Jun")

#: Unfinished beginnings of different kinds, all with an obvious way on.
SHORT: Final = (
    "The seven days of the week are Monday, Tuesday, Wednesday,",
    "def add(a, b):\n    return",
    "The capital of Italy is Rome. The capital of Spain is",
    "Once upon a time there was an old fisherman who lived with his wife in a small",
    "One, two, three, four, five, six, seven,",
    "Wasser ist nass, Feuer ist heiß, und Eis ist sehr",
)

#: What a reference is made over: several languages, code, numbers and structure, 30 to 120 tokens each.
REFERENCE: Final = (
    "Water boils at one hundred degrees Celsius at sea level. On a high mountain the pressure of the air is lower, so "
    "water boils at a lower temperature there, and it takes longer to cook an egg.",
    "def fibonacci(n: int) -> list[int]:\n    numbers = [0, 1]\n    while len(numbers) < n:\n"
    "        numbers.append(numbers[-1] + numbers[-2])\n    return numbers[:n]\n\nprint(fibonacci(10))\n",
    "Die Sonne geht im Osten auf und im Westen unter. Im Sommer sind die Tage lang und die Nächte kurz, im Winter ist "
    "es umgekehrt.",
    "La Révolution française a commencé en 1789. Le peuple de Paris a pris la Bastille le 14 juillet, qui est "
    "aujourd'hui la fête nationale de la France.",
    "地球绕太阳公转一周大约需要三百六十五天。月球绕地球公转一周大约需要二十七天。",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144. 12 + 30 = 42. 7 * 8 = 56. 100 / 4 = 25. 2 ** 10 = 1024. 81 - 9 = 72.",
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "address": {"city": "London", '
    '"country": "United Kingdom"}, "alive": false}',
    "Question: If a train travels 60 miles in one hour, how far does it travel in two and a half hours?\n"
    "Answer: It travels 60 * 2.5 = 150 miles. The answer is 150.",
)


def is_sendable(text: str) -> bool:
    """Whether a text can be written in UTF-8: JSON can spell half of a surrogate pair, which no server can be sent."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def story(length: int, seed: int) -> str:
    """Plain English of exactly ``length`` characters: sentences that differ by seed and from each other.

    It begins with the seed, so that no two share a prefix that a cache could hold.
    """
    draw = random.Random(seed)
    parts = [f"Chronicle number {seed}."]
    size = len(parts[0])
    while size < length:
        sentence = (
            f" {draw.choice(_PEOPLE)} went to the {draw.choice(_PLACES)} on day {draw.randint(1, 365)} and counted "
            f"{draw.randint(2, 99)} {draw.choice(_THINGS)}, while {draw.choice(_PEOPLE)} wrote the numbers down."
        )
        parts.append(sentence)
        size += len(sentence)
    return "".join(parts)[:length]


def storied(length: int, seed: int, ending: str) -> str:
    """A ``story`` that goes over into one of the beginnings, at most ``length`` characters where they leave room."""
    room = length - len(ending) - 2
    return f"{story(room, seed)}\n\n{ending}" if room > 40 else ending
