"""A language model as the server drives it: requests by the contract's tensors in, steps of the engine, responses."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from modelserver.backend import (
    InferRequest,
    InferResponse,
    InvalidArgumentError,
    Measurement,
    StepInstance,
    UnsupportedError,
)
from modelserver.backend import ResponseSender as Sender

from .admission import check_dimensions, check_embedded_length, check_length, check_token_ids
from .answer import AnswerWriter, documents, embedded, texts, tokenized
from .call import Call, ReadRequest, read_call
from .contract import Operation
from .engine_statistics import measure
from .generation import GenerationRequest, SequenceOutput
from .long_texts import LongTexts
from .text.tokenizer import LengthCheck, any_length, both_checks

if TYPE_CHECKING:
    from .engine import Engine
    from .engines.library_engine import LibraryEngine
    from .lora.adapter import Adapter
    from .text.tokenizer import Tokenizer

# Of a step's tokens, those of texts to embed while something is generated, which waits for them: one in this number.
_SHARE_OF_EMBEDDING = 8


@dataclass(slots=True, eq=False)
class _Generation:
    """A request in the engine. `unsent` holds, by the number of a choice, outputs that its reader has no room for."""

    request: InferRequest
    sender: Sender
    asked: GenerationRequest
    writer: AnswerWriter
    num_unfinished: int
    unsent: dict[int, SequenceOutput] = field(default_factory=dict)
    # When the first choice was scheduled, and the first and the last token came of all.
    phases: tuple[int, int, int] | None = None

    def take_phases(self, phases: tuple[int, int, int] | None) -> None:
        if phases is not None and self.phases is not None:
            (start_ns, first_ns, last_ns), (own_start_ns, own_first_ns, own_last_ns) = phases, self.phases
            phases = min(start_ns, own_start_ns), min(first_ns, own_first_ns), max(last_ns, own_last_ns)
        self.phases = phases or self.phases

    def note_phases(self) -> None:
        """For the request's trace."""
        for event, time_ns in zip(("PREFILL_START", "FIRST_TOKEN", "LAST_TOKEN"), self.phases or (), strict=False):
            self.sender.note(event, time_ns)


@dataclass(slots=True, eq=False)
class _Embedding:
    """A request that waits for the step in which it is embedded."""

    request: InferRequest
    sender: Sender
    token_ids: list[int]
    call: Call
    adapter: Adapter | None


class LlmInstance(StepInstance):
    """One engine. Called from the worker's thread; only `measure` is called from another.

    Requests with long texts may be overtaken by all whose texts are read sooner.
    """

    def __init__(
        self, engine: Engine | LibraryEngine, tokenizer: Tokenizer, *, defaults: Mapping[str, Any] | None = None
    ) -> None:
        """`defaults` are sampling parameters of requests that do not set them."""
        self.engine = engine
        self._defaults = defaults or {}
        self._tokenizer = tokenizer
        self._by_request: dict[InferRequest, _Generation] = {}
        self._by_asked: dict[GenerationRequest, _Generation] = {}
        self._embeddings: dict[InferRequest, _Embedding] = {}
        self._long_texts = LongTexts(engine.options.max_num_seqs)
        options = engine.options
        # As many may wait in the engine as can run: enough can follow at once, whatever ends. Where the engine orders
        # requests by priority it has to see them all.
        self._max_waiting = None if options.scheduling_policy == "priority" else options.max_num_seqs
        # Texts to embed that may wait here, beside what is generated: no step takes more, as each has a token.
        self._max_embeddings = options.max_num_batched_tokens

    def add(self, request: InferRequest) -> None:
        if not self._long_texts.add(request, self._read):
            self._begin(request, request.sender, self._read(request, any_length))

    def abort(self, request: InferRequest) -> None:
        if self._long_texts.discard(request):
            return
        self._embeddings.pop(request, None)
        generation = self._by_request.pop(request, None)
        if generation is not None:
            del self._by_asked[generation.asked]
            self.engine.abort(generation.asked)

    def step(self) -> None:
        if self._long_texts:
            self._long_texts.take(self._begin, is_idle=not self._embeddings and not self.engine.has_work)
        if self._embeddings:
            self._embed()
        if not self.engine.has_work:
            return
        try:
            outputs = self.engine.step()
        except BaseException:
            self.engine.reset()
            raise
        for output in outputs:
            generation = self._by_asked.get(output.request)
            if generation is not None:
                self._deliver(generation, output)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work or bool(self._embeddings) or bool(self._long_texts)

    @property
    def has_room(self) -> bool:
        if not self._long_texts.has_room or len(self._embeddings) >= self._max_embeddings:
            return False
        return self._max_waiting is None or self.engine.statistics.num_waiting < self._max_waiting

    def measure(self) -> list[Measurement]:
        num_unread = len(self._long_texts) + len(self._embeddings)
        engine = self.engine
        return measure(
            engine.statistics, num_unread=num_unread, cache=engine.cache_config, adapters=engine.adapter_slots
        )

    def close(self) -> None:
        self._long_texts.close()
        self.engine.close()

    def _read(self, request: InferRequest, check_left: LengthCheck) -> ReadRequest:
        """The part that takes time in proportion to the text. For a long text it runs beside the worker's thread."""
        call = read_call(request, defaults=self._defaults)
        match call.operation:
            case Operation.GENERATE:
                check = partial(
                    check_length, max_tokens=call.params.max_tokens, max_model_len=self.engine.max_model_len
                )
                if call.text == "" and not call.images:
                    read = ReadRequest(call, self._empty_prompt(call), "")
                elif call.images:
                    read = self._read_with_pictures(call, both_checks(check_left, check))
                else:
                    read = ReadRequest(call, *self._prompt(call, both_checks(check_left, check)))
                return self._with_prediction(read, check_left)
            case Operation.EMBED:
                return ReadRequest(call, self._embedded_token_ids(call, check_left))
            case Operation.LOAD_ADAPTER | Operation.SLOTS:
                return ReadRequest(call)
            case Operation.TOKENIZE:
                return ReadRequest(call, response=self._tokenized(call, check_left, request.outputs))
            case Operation.DETOKENIZE:
                return ReadRequest(call, response=self._detokenized(call))
            case _:
                raise InvalidArgumentError(
                    f"input 'operation': this model generates: it does not {call.operation.value}; expected generate, "
                    "embed, tokenize or detokenize"
                )

    def _begin(self, request: InferRequest, sender: Sender, read: ReadRequest) -> None:
        if read.response is not None:
            sender.finish(read.response)
        elif read.call.operation is Operation.EMBED:
            adapter = self._embedder.find_adapter(read.call.adapters)
            self._embeddings[request] = _Embedding(request, sender, read.token_ids, read.call, adapter)
        elif read.call.operation is Operation.LOAD_ADAPTER:
            loaded = self.engine.find_adapter(read.call.adapters)
            found = {} if loaded is None else {"name": loaded.name, "rank": loaded.rank}
            sender.finish(InferResponse([texts("text_output", [json.dumps(found)])]))
        elif read.call.operation is Operation.SLOTS:
            sender.finish(InferResponse([documents("text_output", [self.engine.slots()])]))
        else:
            self._generate(request, sender, read)

    def _generate(self, request: InferRequest, sender: Sender, read: ReadRequest) -> None:
        call, token_ids = read.call, read.token_ids
        prefix = ""
        if call.has_input:
            prefix = self._tokenizer.decode(token_ids) if read.text is None else read.text
        asked = GenerationRequest(
            token_ids,
            call.params,
            priority=call.priority,
            cache_salt=call.cache_salt,
            request_id=request.id,
            arrival_ns=request.arrival_ns,
            is_streamed=call.is_streamed,
            pictures=read.pictures,
            prediction=read.prediction,
            adapters=call.adapters,
        )
        self.engine.add(asked)
        num_choices = call.params.n
        writer = AnswerWriter(
            call.wants,
            self._tokenizer,
            token_ids,
            prefix=prefix,
            has_index=num_choices > 1,
            has_logprobs=call.has_logprobs,
        )
        generation = _Generation(request, sender, asked, writer, num_choices)
        self._by_request[request] = self._by_asked[asked] = generation

    def _deliver(self, generation: _Generation, output: SequenceOutput) -> None:
        """Send what is new of a choice, unless more has to come first, or the reader is behind."""
        if output.error is not None:
            del self._by_request[generation.request], self._by_asked[generation.asked]
            generation.sender.finish(InferResponse(error=output.error))
            return
        if output.finish_reason is not None:
            generation.num_unfinished -= 1
            generation.take_phases(output.phases)
        unsent = generation.unsent
        if unsent and (earlier := unsent.pop(output.choice, None)) is not None:
            earlier.extend(output)
            output = earlier
        writer, sender = generation.writer, generation.sender
        if not generation.num_unfinished:
            unsent[output.choice] = output
            self._finish(generation)
        elif generation.asked.is_streamed and writer.is_worth_sending(output) and sender.has_room:
            sender.send(writer.response((output,)), wait=False)
        else:
            unsent[output.choice] = output

    def _finish(self, generation: _Generation) -> None:
        del self._by_request[generation.request], self._by_asked[generation.asked]
        generation.note_phases()
        remaining = [generation.unsent[choice] for choice in sorted(generation.unsent)]
        if generation.asked.is_streamed:
            for output in remaining[:-1]:
                generation.sender.send(generation.writer.response([output]), wait=False)
            remaining = remaining[-1:]
        generation.sender.finish(generation.writer.response(remaining))

    def _prompt(self, call: Call, check: LengthCheck, longest: int | None = None) -> tuple[list[int], str | None]:
        """The token ids of the prompt, and its text unless it was given as tokens."""
        if call.token_ids is not None:
            token_ids = call.token_ids[:longest]
            check(len(token_ids), True)
            return token_ids.tolist(), None
        text, has_special_tokens = self._text(call)
        encoded = self._tokenizer.encode(text, has_special_tokens, longest=longest, check_length=check)
        return encoded, text if isinstance(text, str) else str(text, "utf-8", "replace")

    def _read_with_pictures(self, call: Call, check: LengthCheck) -> ReadRequest:
        """Its `token_ids` have a token in the place of each row of a picture."""
        reader = self.engine.pictures
        if reader is None:
            raise UnsupportedError("input 'image': this model takes text only, and no pictures")
        seen = reader.see(call.images, partial(check, 0, False))
        given, has_special_tokens = self._text(call)
        text = given if isinstance(given, str) else str(given, "utf-8", "replace")
        token_ids = self._tokenizer.encode(reader.expand(text, seen), has_special_tokens, check_length=check)
        return ReadRequest(call, token_ids, text, pictures=reader.place(seen, token_ids))

    def _with_prediction(self, read: ReadRequest, check_left: LengthCheck) -> ReadRequest:
        """With the tokens of the expected answer, as many as the model has room for."""
        text = read.call.prediction
        if not text:
            return read
        longest = self.engine.max_model_len
        return replace(read, prediction=self._tokenizer.encode(text, False, longest=longest, check_length=check_left))

    def _empty_prompt(self, call: Call) -> list[int]:
        """The tokens of an empty text: those added to every text, or else the one that begins texts."""
        bos_token_id = self._tokenizer.bos_token_id
        begin = [] if bos_token_id is None else [bos_token_id]
        return self._tokenizer.encode("", call.has_special_tokens is not False) or begin

    def _text(self, call: Call) -> tuple[str | bytes, bool]:
        """The text of a call without tokens, and whether the tokenizer adds its special ones."""
        chat = call.chat
        if chat is None:
            return call.text or "", call.has_special_tokens is not False
        text = self._tokenizer.apply_chat_template(
            chat.messages,
            tools=chat.tools,
            add_generation_prompt=chat.has_generation_prompt,
            continue_final_message=chat.is_continued,
            documents=chat.documents,
            variables=chat.variables,
            picture=reader.placeholder if call.images and (reader := self.engine.pictures) is not None else None,
        )
        if call.has_special_tokens is not None:
            return text, call.has_special_tokens
        return text, self._tokenizer.begins_with_special_tokens(text)

    def _tokenized(self, call: Call, check: LengthCheck, outputs: Collection[str] | None) -> InferResponse:
        if call.images:
            token_ids = array("i", self._read_with_pictures(call, check).token_ids)
        else:
            token_ids = self._tokenizer.encode_array(*self._text(call), check_length=check)
        return tokenized(token_ids, self._tokenizer, self.engine.max_model_len, outputs)

    def _detokenized(self, call: Call) -> InferResponse:
        assert call.token_ids is not None, "the call was checked"
        check_token_ids(call.token_ids, self.engine.vocab_size)
        text = self._tokenizer.decode(call.token_ids.tolist(), skip_special_tokens=False)
        return InferResponse([texts("text_output", [text])])

    # Embeddings: computed in a step, without the engine, each text as a whole.

    @property
    def _embedder(self) -> Engine:
        if self.engine.runner is None:
            raise UnsupportedError("input 'operation': the engine of this model generates only, and does not embed")
        return self.engine

    def _embedded_token_ids(self, call: Call, check_left: LengthCheck) -> list[int]:
        runner = self._embedder.runner
        if call.text is not None:
            call = replace(call, text=runner.head.text(call.text))
        check = partial(check_embedded_length, max_model_len=runner.max_model_len)
        token_ids, _ = self._prompt(call, both_checks(check_left, check), call.longest(runner.max_model_len))
        check(len(token_ids), True)
        check_token_ids(token_ids, runner.vocab_size)
        check_dimensions(call.dimensions)
        return token_ids

    def _embed(self) -> None:
        """The requests with the adapter of the first that came first, and fit into a step; one goes in any case."""
        chosen: list[_Embedding] = []
        num_tokens, most = 0, self.engine.options.max_num_batched_tokens
        if self.engine.has_work:
            most //= _SHARE_OF_EMBEDDING
        adapter = next(iter(self._embeddings.values())).adapter
        for embedding in self._embeddings.values():
            if embedding.adapter is not adapter:
                continue
            num_tokens += len(embedding.token_ids)
            if chosen and num_tokens > most:
                break
            chosen.append(embedding)
        vectors = self._embedder.runner.embed([embedding.token_ids for embedding in chosen], adapter)
        for embedding, vector in zip(chosen, vectors, strict=True):
            del self._embeddings[embedding.request]
            embedding.sender.finish(
                embedded(
                    vector,
                    num_tokens=len(embedding.token_ids),
                    dimensions=embedding.call.dimensions,
                    is_normalised=self._embedder.runner.head.is_normalised,
                )
            )
