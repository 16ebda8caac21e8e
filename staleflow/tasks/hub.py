"""Models on the Hugging Face hub, as folders of its cache on this machine; and whether there is a hub.

folder = hub_folder("Qwen/Qwen2.5-0.5B-Instruct")       # downloaded now if it is not in the cache
why_away("openai/gsm8k")                                # None: the hub answers
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from staleflow.errors import ConfigError

SMALL = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Configuration, tokenizer, chat template."""

ANSWER_S = 10.0
"""A hub that does not answer for as long cannot be reached."""


@lru_cache(8)
def hub_folder(name: str, weights: bool = True) -> Path:
    """The folder of a model; without ``weights``, only its small files must be there."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(f"model={name} needs the package huggingface_hub: pip install huggingface_hub") from None
    wanted: Any = {"allow_patterns": [*SMALL, "*.safetensors"] if weights else SMALL}
    try:
        return _whole(Path(snapshot_download(name, local_files_only=True, **wanted)), weights)
    except Exception:  # it is not there, or not all of it
        pass
    try:
        return _whole(Path(snapshot_download(name, **wanted)), weights)
    except Exception as error:  # the library has many kinds
        raise ConfigError(
            f"model={name} is not a folder here, not in the cache, and cannot be loaded from the Hugging Face hub "
            f"({_first_line(error)}): correct the name, or download it where there is a network: hf download {name}"
        ) from None


def why_away(data: str) -> str | None:
    """Why the hub cannot be asked for this data set: asked once, where its libraries try for half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(data, timeout=ANSWER_S)
    except HfHubHTTPError:  # it has answered; what is wrong is said by who wants the data
        return None
    except Exception as error:  # the library has many kinds
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    """What the library goes on to explain is not about this program."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _whole(folder: Path, weights: bool) -> Path:
    """The cache may hold a part of a model."""
    if not (folder / "config.json").is_file() or (weights and not list(folder.glob("*.safetensors"))):
        raise FileNotFoundError("it has no config.json, or no model.safetensors")
    return folder
