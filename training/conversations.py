"""What the small language model learns from: short conversations about Python, made from Python's own documentation.

The material is the standard library's docstrings and `pydoc_data.topics`, both under the Python Software Foundation's
licence, and a few sentences of our own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from types import ModuleType

# Modules whose names people ask for, and that do nothing when they are imported.
MODULES = """
    builtins abc argparse array asyncio base64 bisect calendar cmath collections contextlib copy csv
    dataclasses datetime decimal difflib enum fileinput fnmatch fractions functools gc glob gzip hashlib heapq
    html http inspect io itertools json keyword linecache logging math mimetypes operator os os.path pathlib
    pickle platform pprint queue random re secrets shelve shlex shutil signal socket sqlite3 statistics string
    struct subprocess sys tempfile textwrap threading time timeit traceback types typing unicodedata
    urllib.parse uuid warnings weakref zipfile zlib
""".split()  # noqa: SIM905  # so many words are read more easily so

OWN = (
    ("hello", "Hello! Ask me about Python."),
    ("hi", "Hi! Ask me what a function of Python does."),
    ("good morning", "Good morning! What do you want to know about Python?"),
    ("how are you?", "I am fine, thank you. I am only a small language model."),
    ("who are you?", "I am a very small language model. I have read the documentation of Python."),
    ("what is your name?", "My name is tiny chat. I am a very small language model."),
    ("what can you do?", "I can tell you what the functions and classes of Python do."),
    ("what do you know?", "I have read the documentation of Python, and nothing else."),
    ("are you clever?", "No. I have two million parameters, and I often make mistakes."),
    ("thank you", "You are welcome!"),
    ("thanks!", "You are welcome!"),
    ("goodbye", "Goodbye!"),
    ("bye", "Goodbye, and have a nice day!"),
    ("what is python?", "Python is a programming language that is easy to read and to write."),
    ("who made python?", "Guido van Rossum made Python."),
    ("tell me something", "A list can hold objects of any type, and it can grow."),
    ("what is a list?", "A list holds any number of objects in order, and it can grow."),
    ("what is a dictionary?", "A dictionary maps keys to values."),
    ("how do I open a file?", "Call open with the name of the file."),
    ("how do I read a file?", "Open the file, and call its method read."),
    ("what is the weather today?", "I do not know. I have only read the documentation of Python."),
    ("write a poem", "I cannot write a poem. I can only tell you what functions of Python do."),
    ("tell me a joke", "I know no jokes. I am only a small language model."),
    ("tell me about python", "Python is a programming language. It has lists, dictionaries, functions and classes."),
    ("what is a model server?", "A model server loads models and answers requests of its clients with them."),
    ("what is a language model?", "A language model says which word comes next. I am one, and a very small one."),
    ("what is a token?", "A token is a piece of text: a word, or a part of one."),
)  # fmt: skip
SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows Python.",
    "Answer in one sentence.",
    "Be brief.",
)
QUESTIONS = (
    "What does {name} do?",
    "What does {name}() do?",
    "what does {name} do",
    "Explain {name}.",
    "What is {name} for?",
    "What is {name}?",
    "explain {name}",
    "Tell me about {name}.",
)
TOPIC_QUESTIONS = ("What is {name}?", "Tell me about {name}.", "Explain {name}.", "What do you know about {name}?")

_MAX_ANSWER_LEN = 240
_SENTENCE = re.compile(r"(.{20,}?[.!?])(?=\s|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Turn:
    question: str
    answer: str


@functools.cache
def turns() -> list[tuple[tuple[str, ...], str]]:
    """Ways to ask for something, and the answer. In a fixed order."""
    made = [(_spellings(text), answer) for text, answer in OWN]
    for name, answer in _documented():
        made.append((tuple(question.format(name=name) for question in QUESTIONS), answer))
    for name, answer in _described():
        made.append((tuple(question.format(name=name) for question in TOPIC_QUESTIONS), answer))
    return made


def conversations(generator: random.Random, num: int) -> Iterator[list[dict[str, str]]]:
    """Messages in the form of the chat API: one to four questions, now and then with a system message."""
    known = turns()
    own = known[: len(OWN)]
    short = [turn for turn in known[len(OWN) :] if any("." not in text.rstrip(".") for text in turn[0])]
    for _ in range(num):
        messages = []
        if generator.random() < 0.3:
            messages.append({"role": "system", "content": generator.choice(SYSTEM)})
        for _ in range(generator.choice((1, 1, 2, 3, 4))):
            [chosen] = generator.choices((own, short, known), (0.12, 0.2, 0.68))
            questions, answer = generator.choice(chosen)
            messages.append({"role": "user", "content": generator.choice(questions)})
            messages.append({"role": "assistant", "content": answer})
        yield messages


def _spellings(text: str) -> tuple[str, ...]:
    """As one writes it in haste, and with care."""
    named = text.replace("python", "Python")
    careful = named[:1].upper() + named[1:]
    return text, text.capitalize(), named, careful, careful.rstrip("?!.")


def prose() -> list[str]:
    """The paragraphs of Python's language reference as it comes with the interpreter."""
    paragraphs = []
    for text in topics.values():
        for paragraph in text.split("\n\n"):
            joined = " ".join(paragraph.split())
            if len(joined) > 120 and joined[0].isupper() and "::=" not in joined and ">>>" not in joined:
                paragraphs.append(joined)
    return sorted(set(paragraphs))


def _documented() -> list[tuple[str, str]]:
    """Functions, classes and methods by the name that one writes, and the first sentence of their docstring."""
    found: dict[str, str] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        _add(found, module_name, module)
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or not callable(value) or not _is_of(value, module):
                continue
            _add(found, prefix + name, value)
            if inspect.isclass(value) and module_name in (
                "builtins",
                "collections",
                "datetime",
                "pathlib",
                "threading",
            ):
                for method_name, method in sorted(vars(value).items()):
                    if not method_name.startswith("_") and callable(method):
                        _add(found, f"{prefix}{name}.{method_name}", method)
    return sorted(found.items())


def _described() -> list[tuple[str, str]]:
    """Topics of the language by name, and how their description begins."""
    found = {}
    for name, text in topics.items():
        for paragraph in text.split("\n\n")[1:]:
            answer = _first_sentence(paragraph)
            if answer is not None and "::=" not in paragraph:
                found[f"the {name} statement" if text.startswith(f'The "{name}" statement') else name.lower()] = answer
                break
    return sorted(found.items())


def _is_of(value: object, module: ModuleType) -> bool:
    owner = getattr(value, "__module__", None) or module.__name__
    return owner.lstrip("_").split(".")[0] in (module.__name__.split(".")[0], "posix", "posixpath", "genericpath", "io")


def _add(found: dict[str, str], name: str, value: object) -> None:
    with contextlib.suppress(Exception):  # some raise when they are asked
        answer = _first_sentence(inspect.getdoc(value) or "")
        if answer is not None:
            found[name] = answer


def _first_sentence(text: str) -> str | None:
    """None if there is none in plain words."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    match = _SENTENCE.match(paragraph)
    sentence = match.group(1) if match else paragraph
    is_plain = sentence.isascii() and sentence[:1].isupper() and not re.search(r"[*`<>{}|\\]|\.\.\.|--|->|::", sentence)
    if not is_plain or not 20 <= len(sentence) <= _MAX_ANSWER_LEN:
        return None
    return sentence if sentence[-1] in ".!?" else f"{sentence}."
