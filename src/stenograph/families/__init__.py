"""The registry of model families, and the family that a model's files are of.

To add a family: a folder of its own beside this one (one module where it is nothing but a declaration), and its name in
FAMILIES.
"""

import json

from stenograph.core.errors import StartupError
from stenograph.families.chatml import CHATML
from stenograph.families.deepseek.dsml_models import DEEPSEEK_V3_2, DEEPSEEK_V4
from stenograph.families.deepseek.r1 import (
    DEEPSEEK_R1,
    DEEPSEEK_R1_0528,
    DEEPSEEK_R1_0528_DISTILL,
    DEEPSEEK_R1_DISTILL,
)
from stenograph.families.deepseek.v3 import DEEPSEEK_V3, DEEPSEEK_V3_1
from stenograph.families.generic import TEMPLATE
from stenograph.families.glm.family import GLM4_5, GLM4_7, GLM5_1, GLM5_2
from stenograph.families.gpt_oss.family import GPT_OSS
from stenograph.families.kimi.family import KIMI_K2
from stenograph.families.llama.family import LLAMA3, LLAMA3_1
from stenograph.families.minimax.family import MINIMAX_M2, MINIMAX_M3
from stenograph.families.mistral.family import (
    MISTRAL_V3,
    MISTRAL_V7,
    MISTRAL_V11,
    MISTRAL_V13,
    MISTRAL_V13_THINKING,
)
from stenograph.families.nemotron3 import NEMOTRON3
from stenograph.families.qwen.qwen2_5 import QWEN2_5
from stenograph.families.qwen.qwen3 import QWEN3, QWEN3_THINKING
from stenograph.families.qwen.qwen3_5 import QWEN3_5, QWEN3_CODER
from stenograph.families.qwen.qwq import QWQ
from stenograph.families.smollm2 import SMOLLM2
from stenograph.model.files import ModelFiles
from stenograph.render.family import Family, Signs

__all__ = ["FAMILIES", "Family", "family_for", "family_named", "template_source"]

FAMILIES: tuple[Family, ...] = (
    QWEN3_THINKING,
    QWEN3,
    QWEN3_5,
    QWEN3_CODER,
    NEMOTRON3,
    KIMI_K2,
    QWQ,
    QWEN2_5,
    GLM4_5,
    GLM5_1,
    GLM4_7,
    GLM5_2,
    MINIMAX_M2,
    MINIMAX_M3,
    DEEPSEEK_V3,
    DEEPSEEK_V3_1,
    DEEPSEEK_R1,
    DEEPSEEK_R1_DISTILL,
    DEEPSEEK_R1_0528,
    DEEPSEEK_R1_0528_DISTILL,
    DEEPSEEK_V4,
    DEEPSEEK_V3_2,
    LLAMA3_1,
    LLAMA3,
    MISTRAL_V3,
    MISTRAL_V7,
    MISTRAL_V11,
    MISTRAL_V13_THINKING,
    MISTRAL_V13,
    SMOLLM2,
    GPT_OSS,
    CHATML,
    TEMPLATE,
)
"""In the order in which they are looked for; the last takes any template."""


def family_named(name: str) -> Family:
    """The family of this name. Raises StartupError: there is none."""
    found = next((family for family in FAMILIES if family.name == name), None)
    if found is None:
        known = ", ".join(family.name for family in FAMILIES)
        raise StartupError(f"family {name!r} is unknown; known are auto, {known}")
    return found


def family_for(files: ModelFiles, name: str = "auto") -> Family:
    """The family called `name`; for "auto", the first whose signs the files show.

    Raises StartupError: an unknown name, a model that lacks the named family's tokens, or one with no template, of no
    family that does without.
    """
    if name == "auto":
        shown = next((family for family in FAMILIES if family.signs and _are_shown(family.signs, files)), TEMPLATE)
        if shown is TEMPLATE and files.chat_template is None:
            raise StartupError(f"{files.path}: it has no chat template, and is of no known family; --family names one")
        return shown
    family = family_named(name)
    missing = [token for token in (family.signs.tokens if family.signs else ()) if not _has_token(files, token)]
    if missing:
        raise StartupError(f"{files.path}: it is not of the family {name}: its tokenizer has no {missing[0]}")
    return family


def template_source(family: Family, files: ModelFiles) -> str | None:
    """The source of the template that the family uses with this model; None for a family that has an encoder.

    The edits are made all, or, where one of them does not fit, none: whether the template may be used as it is then
    is for the proof to say. Raises StartupError: neither the model nor the family brings a template.
    """
    if family.encoder is not None:
        return None
    if family.template is not None:
        return family.template
    source = files.chat_template or family.spare_template
    if source is None:
        raise StartupError(f"{files.path} has no chat template, and the family {family.name} brings none")
    if all(source.count(edit.old) == 1 for edit in family.edits):
        for edit in family.edits:
            source = source.replace(edit.old, edit.new)
    return source


def _are_shown(signs: Signs, files: ModelFiles) -> bool:
    has_tokens = all(_has_token(files, token) for token in signs.tokens)
    if signs.tekken is not None and files.tekken_version is not None:
        return has_tokens and signs.tekken == files.tekken_version
    template = files.chat_template
    if not signs.any_template and (template is None) != signs.without_template:
        return False
    return (
        has_tokens
        and all(text in (template or "") for text in signs.template)
        and not any(text in (template or "") for text in signs.not_template)
    )


def _has_token(files: ModelFiles, token: str) -> bool:
    """Whether the tokenizer's file spells it, in either of the ways that JSON allows."""
    return any(json.dumps(token, ensure_ascii=ascii_only) in files.tokenizer_json for ascii_only in (False, True))
