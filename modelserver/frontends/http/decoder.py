"""From the body of an infer call to a request: by a template where the call is known, in full where it is not."""

from __future__ import annotations

from modelserver.core.stream import ResponseStream
from modelserver.core.tensor import Buffer
from modelserver.errors import ServerError
from modelserver.frontends.http.codec import decode_infer
from modelserver.frontends.http.head import HeadReader, RequestHead
from modelserver.frontends.http.json_templates import JsonTemplates
from modelserver.frontends.http.limits import HttpLimits
from modelserver.frontends.http.templates import BinaryTemplates, Known, RecentCall


class InferDecoder:
    """Decodes infer calls within `limits`. Event loop thread only."""

    def __init__(self, limits: HttpLimits) -> None:
        self._heads = HeadReader(limits)
        self._binary = BinaryTemplates()
        self._json = JsonTemplates()

    def decode(
        self,
        name: str,
        version: int | None,
        body: Buffer,
        head_len: int | None,
        stream: ResponseStream,
        recent: RecentCall | None = None,
    ) -> Known:
        """The request, whose responses go to `stream`, and how its outputs shall be encoded.

        `head_len` is the size of the JSON part (None: all of the body). `recent` becomes this call where it is a known
        one with binary tensors. Tensors are views of `body`. Raises
        InvalidArgumentError, PayloadTooLargeError for what is over the limits, UnsupportedError for extensions
        that this server does not have.
        """
        if head_len is None:
            text = bytes(body)
            known = self._json.find(name, version, text, stream)
        else:
            known = self._binary.find(name, version, body, head_len, stream, recent)
        if known is not None:
            return known
        head: RequestHead | None = None
        try:
            if head_len is None:
                head = self._heads.read(text)
                request, form = decode_infer(name, version, body, head, len(text))
                self._json.learn(request, form, head, text)
            else:
                text = bytes(body[:head_len])
                head = self._heads.recall(text)
                request, form = decode_infer(name, version, body, head, head_len)
                self._binary.learn(request, form, head, text)
        except ServerError as error:
            error.name_request(name, "" if head is None else head.id)
            raise
        request.stream = stream
        return request, form
