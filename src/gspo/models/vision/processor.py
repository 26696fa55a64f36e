"""The processor of a vision-language model on Pillow, and small pictures for people.

transformers' processor classes want a video processor, and that wants torchvision, which must not be a dependency: the
package index has it for CUDA only, and beside a CPU build of torch it breaks the import of every model. So a processor
is loaded with its image processor on Pillow and without a video processor.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, AutoImageProcessor, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from gspo.errors import DataError
from gspo.models import cache
from gspo.models.find import EMBEDDED, locate
from gspo.models.folder import check_settings
from gspo.system import install_command
from gspo.types import ImageFile, Images

FILES = ("preprocessor_config.json", "processor_config.json")  # one of them is in the folder of every such model
_OTHER_FILES = ("video_preprocessor_config.json", "chat_template.json", "chat_template.jinja")
_KEPT_BYTES = 512 * 2**20  # of prepared images: those of a batch are used by the sampler and then by the trainer
_NOT_INPUTS = ("input_ids", "attention_mask", "labels")  # of what a processor returns

Inputs = Mapping[str, NDArray[Any]]


class Processor:
    """The processor of one model.

    `placeholder` stands for one image in a text; `prompt` expands it to as many tokens as the image has features.
    """

    def __init__(self, inner: Any, files: Mapping[str, bytes]) -> None:
        self.inner = inner  # transformers' ProcessorMixin
        self._files = files
        self.tokenizer: PreTrainedTokenizerBase = inner.tokenizer
        self.placeholder: str = inner.image_token
        self.chat_template = inner.chat_template or self.tokenizer.chat_template
        mean = getattr(inner.image_processor, "image_mean", None)
        self._mode = "L" if isinstance(mean, Sequence) and len(mean) == 1 else "RGB"
        self._kept: OrderedDict[tuple[str, str], Inputs] = OrderedDict()  # by text and digest, oldest first
        # wait: none, held for one look-up
        self._lock = threading.Lock()  # the sampler may run in another thread than the trainer

    @property
    def needs_images(self) -> bool:
        """Whether the model reads a prompt both ways, which transformers supports with images only (PaliGemma)."""
        return any(kind.__name__ == "PaliGemmaProcessor" for kind in type(self.inner).__mro__)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Messages by the chat template; a part {"type": "image"} of a message becomes a placeholder."""
        chosen = {"chat_template": self.chat_template, "add_generation_prompt": True, **options}
        return self.inner.apply_chat_template([dict(m) for m in messages], tokenize=False, **chosen)

    def prompt(
        self, text: str, images: Sequence[ImageFile] = (), *, add_special_tokens: bool = False
    ) -> tuple[tuple[int, ...], Images | None]:
        """The tokens of a text with one placeholder per image, and what it shows; None: no image.

        `add_special_tokens` is for text that no chat template has rendered.
        """
        found = text.count(self.placeholder)
        if found != len(images):
            raise DataError(
                f"the prompt has {found} image placeholders ({self.placeholder}) and {len(images)} images; "
                "there must be one placeholder per image"
            )
        if not images:
            if self.needs_images:
                raise DataError(f"{type(self.inner).__name__}: the model needs an image in every prompt")
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens)), None
        opened = self._open(images)
        digest = _digest(opened)
        tokens, inputs = self._process(text, images, opened, add_special_tokens)
        self._keep((text, digest), inputs)

        def prepare() -> Inputs:
            with self._lock:
                if (kept := self._kept.get((text, digest))) is not None:
                    self._kept.move_to_end((text, digest))
                    return kept
            again = self._open(images)
            if _digest(again) != digest:
                raise DataError(f"{_names(images)}: the image is not the one that it was when this run read it first")
            made = self._process(text, images, again, add_special_tokens)[1]
            self._keep((text, digest), made)
            return made

        sizes = tuple(image.size for image in opened)
        names = tuple(image.name for image in images)
        return tokens, Images(digest, prepare, names, sizes, lambda: thumbnail(self._open(images)))

    def pixels(self, images: Sequence[NDArray[np.uint8]]) -> Inputs:
        """The model's inputs for images of [height, width] or [height, width, 3], without a text."""
        from PIL import Image

        made = self.inner.image_processor(images=[Image.fromarray(image) for image in images], return_tensors="np")
        return {name: np.asarray(value) for name, value in made.items()}

    def save(self, folder: Path) -> None:
        """Write the processor's files as they were in the model's folder; the tokenizer's are not among them."""
        for name, content in self._files.items():
            (folder / name).write_bytes(content)

    def _open(self, images: Sequence[ImageFile]) -> list[Any]:
        opened = []
        for image in images:
            try:
                opened.append(image.open().convert(self._mode))
            except DataError as cause:
                raise DataError(f"{image.name}: {cause}") from None
            except Exception as cause:  # Pillow raises many types for a damaged file
                raise DataError(f"{image.name}: the image cannot be read: {type(cause).__name__}: {cause}") from cause
        return opened

    def _process(
        self, text: str, images: Sequence[ImageFile], opened: list[Any], add_special_tokens: bool
    ) -> tuple[tuple[int, ...], Inputs]:
        try:
            made = self.inner(images=opened, text=[text], add_special_tokens=add_special_tokens, return_tensors="np")
        except Exception as cause:  # a processor is a program on a stranger's image, and may raise anything
            raise DataError(
                f"{_names(images)}: the model's processor cannot take the image: {type(cause).__name__}: {cause}"
            ) from cause
        tokens = tuple(int(token) for token in made["input_ids"][0])
        return tokens, {name: np.asarray(value) for name, value in made.items() if name not in _NOT_INPUTS}

    def _keep(self, key: tuple[str, str], inputs: Inputs) -> None:
        with self._lock:
            self._kept[key] = inputs
            while len(self._kept) > 1 and sum(_num_bytes(kept) for kept in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)


def takes_images(config: Any) -> bool:
    """Whether transformers has an image-text-to-text model for this config."""
    return getattr(config, "model_type", None) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def load_processor(path: str, tokenizer: PreTrainedTokenizerBase, key: str = "actor.path") -> Processor | None:
    """The processor of a model that takes images, with the run's tokenizer; None for a model of text alone."""
    path = locate(path, key, weights=False)
    if path.startswith(EMBEDDED):
        from gspo.models import embedded

        with tempfile.TemporaryDirectory() as tmp:  # the model need not be built for its processor
            embedded.write_processor(path, Path(tmp))
            return _load(Path(tmp), tokenizer, key)
    return _load(Path(path), tokenizer, key)


def _load(folder: Path, tokenizer: PreTrainedTokenizerBase, key: str) -> Processor | None:
    if not any((folder / name).is_file() for name in FILES):
        return None
    check_settings(folder)
    if find_spec("PIL") is None:
        raise DataError(f"{key}: images need Pillow: {install_command('vision')}")
    if (folder / "audio_tokenizer_config.json").exists():
        raise DataError(f"{folder / 'audio_tokenizer_config.json'} would load another model; remove it")
    with cache.quiet():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if not takes_images(config) or type(config) not in PROCESSOR_MAPPING:
            return None
        try:
            inner = _on_pillow(PROCESSOR_MAPPING[type(config)], folder, tokenizer)
            names = [name for name in (*FILES, *_OTHER_FILES) if (folder / name).is_file()]
            return Processor(inner, {name: (folder / name).read_bytes() for name in names})
        except Exception as cause:  # transformers' own code runs on the folder's values, and may raise anything
            raise DataError(
                f"{key}: the image processor in '{folder}' cannot be loaded: {type(cause).__name__}: {str(cause)[:300]}"
            ) from cause


def _on_pillow(kind: Any, folder: Path, tokenizer: Any) -> Any:
    """transformers' processor of class `kind` with this tokenizer, a Pillow image processor and nothing for videos."""

    class OnPillow(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)  # None stands for the video processor

        @classmethod
        def _get_arguments_from_pretrained(cls, folder: Any, processor_dict: Any = None, **options: Any) -> list[Any]:
            images = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
            parts = {"image_processor": images, "tokenizer": tokenizer}
            return [parts.get(name) for name in cls.get_attributes()]

    # SmolVLM refuses to start without a package that it uses for videos only.
    module: Any = sys.modules[kind.__module__]
    if getattr(module, "num2words", True) is None:
        module.num2words = str
    OnPillow.__name__ = kind.__name__  # for error messages
    return OnPillow.from_pretrained(folder)


def _digest(images: Sequence[Any]) -> str:
    total = hashlib.sha256()
    for image in images:
        total.update(f"{image.mode} {image.size}".encode())
        total.update(image.tobytes())
    return total.hexdigest()


def _names(images: Sequence[ImageFile]) -> str:
    return ", ".join(image.name for image in images)


def _num_bytes(inputs: Inputs) -> int:
    return sum(array.nbytes for array in inputs.values())


SIDE = 160  # pixels of the longer side of an image
MAX_IMAGES = 4  # of a prompt, side by side
_TINY = 64  # images up to this side are stored without loss: their pixels can be seen


def thumbnail(images: Sequence[Any]) -> bytes:
    """The first images of a prompt side by side, each at most SIDE pixels wide and high, as a WebP file."""
    from PIL import Image

    small = []
    for image in images[:MAX_IMAGES]:
        one = image.convert("RGB")
        one.thumbnail((SIDE, SIDE))
        small.append(one)
    gap = 4
    sheet = Image.new("RGB", (sum(i.width + gap for i in small) - gap, max(i.height for i in small)), "white")
    left = 0
    for one in small:
        sheet.paste(one, (left, 0))
        left += one.width + gap
    content = BytesIO()
    sheet.save(content, "webp", lossless=max(sheet.size) <= _TINY, quality=80)
    return content.getvalue()
