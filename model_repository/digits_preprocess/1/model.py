"""PNG or JPEG bytes -> 8x8 pixels as the digit models want them: ink 1, paper 0."""

import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image, UnidentifiedImageError

SIZE = (8, 8)
# A few kilobytes of PNG can claim gigabytes of pixels; digits need none of that.
MAX_PIXELS = 4096 * 4096


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        pictures = pb_utils.get_input_tensor_by_name(request, "picture").as_numpy()
        try:
            images = [digit_pixels(picture) for picture in pictures.reshape(-1)]
        except ValueError as error:
            failure = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(output_tensors=[], error=failure)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("image", np.stack(images))])


def digit_pixels(picture: bytes) -> np.ndarray:
    """The picture in gray at 8x8 pixels, scaled to 0..1. Raises ValueError when it is none."""
    try:
        with Image.open(io.BytesIO(picture), formats=("PNG", "JPEG")) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise ValueError(f"picture of {opened.width}x{opened.height} pixels is too large")
            gray = opened.convert("L").resize(SIZE, Image.Resampling.BOX)
    except UnidentifiedImageError:  # whose text names an address in memory
        raise ValueError(f"cannot decode {len(picture)} bytes as a PNG or JPEG picture: it is neither") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot decode {len(picture)} bytes as a PNG or JPEG picture: {error}") from error
    pixels = np.asarray(gray, dtype=np.float32) / 255
    # Dark ink on light paper: digits leave the outer columns empty, so these show the paper's colour.
    if pixels[:, [0, -1]].mean() > 0.5:
        pixels = 1 - pixels
    return pixels
