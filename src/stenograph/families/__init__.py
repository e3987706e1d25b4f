"""The registry of model families, and the choice of one by a model's files.

To add a family: a folder of its own beside this one (one module where it is nothing but a declaration), and its row in
FAMILIES. A family is loaded where it is named, or where the files have a sign of it.
"""

import json
from dataclasses import dataclass

from stenograph.core.errors import StartupError
from stenograph.core.loaded import entry
from stenograph.model.files import ModelFiles
from stenograph.text.family import Family, Signs

__all__ = ["FAMILIES", "TEMPLATE", "Family", "Known", "family_for", "family_named", "template_source"]


TEMPLATE = Family(name="template", summary="any other chat template, as it stands", tools_before_turns=False)
"""Any template as it stands: roles and tools are found by rendering, and if it is append-only it is served."""


@dataclass(frozen=True, slots=True)
class Known:
    """A known family, loaded or not. `sign` is one of its signs: a token, or a text of its template."""

    name: str
    entry: str
    sign: str

    def family(self) -> Family:
        """Its declaration."""
        found: Family = entry(self.entry)
        return found


FAMILIES: tuple[Known, ...] = (
    Known("qwen3-thinking", "stenograph.families.qwen.family:QWEN3_THINKING", "<tool_call>"),
    Known("qwen3", "stenograph.families.qwen.family:QWEN3", "<tool_call>"),
    Known("qwen3.5", "stenograph.families.qwen.qwen3_5:QWEN3_5", "<tool_call>"),
    Known("qwen3-coder", "stenograph.families.qwen.qwen3_5:QWEN3_CODER", "<tool_call>"),
    Known("qwen3-vl", "stenograph.families.qwen.vision:QWEN3_VL", "<|image_pad|>"),
    Known("qwen2.5-vl", "stenograph.families.qwen.vision:QWEN2_5_VL", "<|image_pad|>"),
    Known("nemotron3", "stenograph.families.nemotron3:NEMOTRON3", "truncate_history_thinking"),
    Known("kimi-k2", "stenograph.families.kimi.family:KIMI_K2", "<|im_middle|>"),
    Known("qwq", "stenograph.families.qwen.family:QWQ", "<tool_call>"),
    Known("qwen2.5", "stenograph.families.qwen.family:QWEN2_5", "<tool_call>"),
    Known("glm-4.5v", "stenograph.families.glm.family:GLM4_5V", "<|image|>"),
    Known("glm-4.5", "stenograph.families.glm.family:GLM4_5", "<arg_key>"),
    Known("glm-5.1", "stenograph.families.glm.family:GLM5_1", "<arg_key>"),
    Known("glm-4.7", "stenograph.families.glm.family:GLM4_7", "<arg_key>"),
    Known("glm-5.2", "stenograph.families.glm.family:GLM5_2", "<arg_key>"),
    Known("minimax-m2", "stenograph.families.minimax.family:MINIMAX_M2", "]~b]"),
    Known("minimax-m3", "stenograph.families.minimax.family:MINIMAX_M3", "]~b]"),
    Known("deepseek-v3", "stenograph.families.deepseek.v3:DEEPSEEK_V3", "<｜User｜>"),
    Known("deepseek-v3.1", "stenograph.families.deepseek.v3:DEEPSEEK_V3_1", "<｜User｜>"),
    Known("deepseek-r1", "stenograph.families.deepseek.r1:DEEPSEEK_R1", "<｜User｜>"),
    Known("deepseek-r1-distill", "stenograph.families.deepseek.r1:DEEPSEEK_R1_DISTILL", "<｜User｜>"),
    Known("deepseek-r1-0528", "stenograph.families.deepseek.r1:DEEPSEEK_R1_0528", "<｜User｜>"),
    Known("deepseek-r1-0528-distill", "stenograph.families.deepseek.r1:DEEPSEEK_R1_0528_DISTILL", "<｜User｜>"),
    Known("deepseek-v4", "stenograph.families.deepseek.dsml_models:DEEPSEEK_V4", "｜DSML｜"),
    Known("deepseek-v3.2", "stenograph.families.deepseek.dsml_models:DEEPSEEK_V3_2", "｜DSML｜"),
    Known("llama3.1", "stenograph.families.llama.family:LLAMA3_1", "<|eot_id|>"),
    Known("llama3", "stenograph.families.llama.family:LLAMA3", "<|eot_id|>"),
    Known("mistral-v3", "stenograph.families.mistral.family:MISTRAL_V3", "[INST]"),
    Known("mistral-v7", "stenograph.families.mistral.family:MISTRAL_V7", "[INST]"),
    Known("mistral-v11", "stenograph.families.mistral.family:MISTRAL_V11", "[INST]"),
    Known("mistral-v13-thinking", "stenograph.families.mistral.family:MISTRAL_V13_THINKING", "[INST]"),
    Known("mistral-v13", "stenograph.families.mistral.family:MISTRAL_V13", "[INST]"),
    Known("smollm2", "stenograph.families.chatml:SMOLLM2", "<|im_start|>"),
    Known("gpt-oss", "stenograph.families.gpt_oss.family:GPT_OSS", "<|channel|>"),
    Known("chatml", "stenograph.families.chatml:CHATML", "<|im_start|>"),
    Known("template", "stenograph.families:TEMPLATE", ""),
)
"""In the order of the search; the last takes any template."""


def family_named(name: str) -> Family:
    """The family of this name. Raises StartupError: there is none."""
    found = next((known for known in FAMILIES if known.name == name), None)
    if found is None:
        names = ", ".join(known.name for known in FAMILIES)
        raise StartupError(f"family {name!r} is unknown; known are auto, {names}")
    return found.family()


def family_for(files: ModelFiles, name: str = "auto") -> Family:
    """The family called `name`; for "auto", the first with its signs in the files.

    Raises StartupError: an unknown name, a model without the named family's tokens, or, for "auto", no template and no
    known family.
    """
    if name == "auto":
        template, signs = files.chat_template or "", {known.sign for known in FAMILIES if known.sign}
        seen = {sign for sign in signs if sign in template or _has_token(files, sign)}
        families = (known.family() for known in FAMILIES if known.sign in seen)
        shown = next((family for family in families if family.signs and _are_shown(family.signs, files)), TEMPLATE)
        if shown is TEMPLATE and files.chat_template is None:
            raise StartupError(f"{files.path}: it has no chat template, and is of no known family; --family names one")
        return shown
    family = family_named(name)
    missing = [token for token in (family.signs.tokens if family.signs else ()) if not _has_token(files, token)]
    if missing:
        raise StartupError(f"{files.path}: it is not of the family {name}: its tokenizer has no {missing[0]}")
    return family


def template_source(family: Family, files: ModelFiles) -> str | None:
    """The source of the family's template for this model; None for a family with an encoder.

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
    """Whether the tokenizer's file spells it, in either of the ways allowed by JSON."""
    return any(json.dumps(token, ensure_ascii=ascii_only) in files.tokenizer_json for ascii_only in (False, True))
