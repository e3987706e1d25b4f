"""What differs between model families, as data; and which family a model's files are of."""

from stenograph.core.errors import StartupError
from stenograph.render.families.chatml import chatml
from stenograph.render.families.family import Family, ReplySyntax
from stenograph.render.families.smollm2 import DEFAULT_SYSTEM, SMOLLM2
from stenograph.render.model_files import ModelFiles

__all__ = ["FAMILIES", "Family", "ReplySyntax", "family_for"]

FAMILIES = ("smollm2", "chatml")


def family_for(files: ModelFiles, name: str = "auto") -> Family:
    """The family called `name`; for "auto", the one that the template and the added tokens show.

    Raises StartupError: an unknown name, a model without ChatML's tokens, or a template that is of no known family.
    """
    if name not in (*FAMILIES, "auto"):
        raise StartupError(f"family {name!r} is unknown; known are auto, {', '.join(FAMILIES)}")
    template = files.chat_template
    missing = [token for token in ("<|im_start|>", "<|im_end|>") if f'"{token}"' not in files.tokenizer_json]
    if missing:
        raise StartupError(f"{files.path}: no known family ({', '.join(FAMILIES)}): its tokenizer has no {missing[0]}")
    if name == "smollm2" or (name == "auto" and template is not None and DEFAULT_SYSTEM in template):
        return SMOLLM2
    if name == "chatml" or (template is not None and "<|im_start|>" in template and "<|im_end|>" in template):
        return chatml(template)
    why = "it has no chat template" if template is None else "its chat template does not write <|im_start|>"
    raise StartupError(f"{files.path}: no known family ({', '.join(FAMILIES)}): {why}; --family names one")
