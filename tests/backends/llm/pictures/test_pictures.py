"""Greedy tokens after pictures are those of transformers' generate(), whatever the batch, the chunks and the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.sampling_params import SamplingParams
from support.tiny_pictures import FAMILIES, draw_picture, prompt_text, reference_answer, write_picture_checkpoint

from modelserver.errors import InvalidArgumentError

Checkpoints = Callable[[str], Path]
Prompt = tuple[str, tuple[bytes, ...]]
NUM_TOKENS = 10
SMALL, WIDE, TALL = draw_picture(0), draw_picture(1, (90, 31)), draw_picture(2, (20, 70))


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The directory of a tiny checkpoint of a family that sees pictures."""

    @cache
    def written(family: str) -> Path:
        return write_picture_checkpoint(tmp_path_factory.mktemp("pictures") / family, family)

    return written


@contextmanager
def loaded(directory: Path, **options: Any) -> Iterator[Engine]:
    chosen = EngineOptions(**{"device": "cpu", "dtype": "float32", "max_model_len": 480, **options})
    with open_checkpoint(directory) as checkpoint:
        engine = Engine.from_checkpoint(checkpoint, chosen)
    try:
        yield engine
    finally:
        engine.close()


def request_of(engine: Engine, prompt: Prompt, num_tokens: int = NUM_TOKENS) -> GenerationRequest:
    text, files = prompt
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    reader, tokenizer = engine.pictures, engine.tokenizer
    assert reader is not None
    assert tokenizer is not None
    if not files:
        return GenerationRequest(tokenizer.encode(text, False), params)
    seen = reader.see(files, lambda: None)
    token_ids = tokenizer.encode(reader.expand(text, seen), False)
    return GenerationRequest(token_ids, params, pictures=reader.place(seen, token_ids))


def answers(engine: Engine, prompts: Sequence[Prompt]) -> list[tuple[list[int], list[int]]]:
    """The tokens of each prompt and of its continuation; all run at once."""
    requests = [request_of(engine, prompt) for prompt in prompts]
    found: dict[GenerationRequest, list[int]] = {request: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found[output.request] += output.token_ids
    return [(request.prompt_token_ids, found[request]) for request in requests]


def prompts_of(family: str) -> list[Prompt]:
    return [
        (prompt_text(family, "hello world"), (SMALL,)),
        (prompt_text(family, "the model of a server", 2), (WIDE, SMALL)),
        (prompt_text(family, "what is this", 0), ()),
        (prompt_text(family, "hello world"), (TALL,)),
    ]


@cache
def expected(directory: Path, family: str) -> list[tuple[list[int], list[int]]]:
    return [reference_answer(directory, family, *prompt, NUM_TOKENS) for prompt in prompts_of(family)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_equals_transformers(family: str, seeing: Checkpoints) -> None:
    directory = seeing(family)
    marked = [(text.replace(FAMILIES[family].written, "<__media__>"), files) for text, files in prompts_of(family)]
    with loaded(directory) as engine:
        assert answers(engine, prompts_of(family)) == expected(directory, family)
        assert answers(engine, marked) == expected(directory, family), "a mark is what the template writes"


@pytest.mark.parametrize("family", FAMILIES)
def test_small_blocks_chunks_and_preemptions_change_nothing(family: str, seeing: Checkpoints) -> None:
    directory = seeing(family)
    longest = max(len(prompt) for prompt, _ in expected(directory, family)) + NUM_TOKENS
    options = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    options["num_gpu_blocks_override"] = longest // 4 + 12
    with loaded(directory, **options) as engine:
        assert answers(engine, prompts_of(family)) == expected(directory, family)
        assert engine.statistics.num_preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_share_blocks_only_with_themselves(family: str, seeing: Checkpoints) -> None:
    directory = seeing(family)
    prompts = prompts_of(family)
    with loaded(directory, block_size=4) as engine:
        for prompt, (token_ids, tokens) in zip(prompts, expected(directory, family), strict=True):
            assert answers(engine, [prompt]) == [(token_ids, tokens)]
        before = engine.statistics.num_prefix_hit_tokens
        assert answers(engine, prompts[:1]) == expected(directory, family)[:1]
        length = len(expected(directory, family)[0][0])
        assert engine.statistics.num_prefix_hit_tokens - before >= length - 4


def test_equal_tokens_of_other_pictures_are_other_blocks(seeing: Checkpoints) -> None:
    """All pictures of a LLaVA are as many tokens, so that only their contents tell prompts apart."""
    with loaded(seeing("llava"), block_size=4) as engine:
        first, second = (request_of(engine, (prompt_text("llava", "hello"), (each,))) for each in (SMALL, WIDE))
        assert first.prompt_token_ids == second.prompt_token_ids
        for request in (first, second):
            engine.add(request)
            while engine.has_work:
                engine.step()
        beginning = first.pictures.rows[0] // 4 * 4  # type: ignore[union-attr]
        assert engine.statistics.num_prefix_hit_tokens == beginning


def test_a_picture_is_seen_once_while_it_is_kept(seeing: Checkpoints) -> None:
    with loaded(seeing("llava")) as engine:
        reader = engine.pictures
        assert reader is not None
        first, again, other = reader.see([SMALL, SMALL, WIDE], lambda: None)
        assert first is again
        assert first is not other
    with loaded(seeing("llava"), mm_processor_cache_gb=0) as engine:
        reader = engine.pictures
        assert reader is not None
        first, again = reader.see([SMALL, SMALL], lambda: None)
        assert first is not again
        assert first.embeddings.equal(again.embeddings)


def test_places_and_pictures_must_be_as_many(seeing: Checkpoints) -> None:
    with loaded(seeing("llava"), limit_mm_per_prompt=2) as engine:
        for text, files, message in (
            ("no place", (SMALL,), r"has 1 pictures, and the prompt has 0 places"),
            ("<image> <image>", (SMALL,), r"has 1 pictures, and the prompt has 2 places"),
            ("<image>" * 3, (SMALL,) * 3, r"has 3 pictures; this model takes at most 2"),
            ("<image>", (b"\x89PNG nonsense",), r"picture 0: the file cannot be read as a picture"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                request_of(engine, (text, files))
