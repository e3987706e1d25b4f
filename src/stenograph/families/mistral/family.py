"""Mistral's models with a Tekken tokenizer, by the version of their format: 3, 7, 11 and 13.

Written by an encoder of ours, whatever template the files bring: those raise where users' messages follow each other,
put the tools before the last user's message, and some have a system message of their own. The version is the one that
a tekken.json names; without one the template shows it. The models of the sentencepiece tokenizers, versions 1 to 7, are
none of these: their tokenizers are not byte-level.

Source: the encoders in the package mistral-common.
"""

from stenograph.core.messages import Role
from stenograph.families.mistral.calls import ARGS, ID_MARK, LIST_CALLS, NAMED_CALLS, NAMED_CALLS_WITH_IDS, TOOL_CALLS
from stenograph.families.mistral.encoder import THINK, THINK_END, MistralEncoder
from stenograph.text.call_syntax import CallSyntax
from stenograph.text.family import Family, Signs
from stenograph.text.reply_syntax import ReasoningMarks, ReplySyntax

_TOKENS = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]", TOOL_CALLS)
_SYSTEM = "[SYSTEM_PROMPT]"
_ROLES = frozenset({Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL})
_INSTRUCTING = frozenset({Role.SYSTEM, Role.DEVELOPER})
_THINKING = ReasoningMarks(open=THINK, close=THINK_END, after_open="", before_close="", after_close="")


def _family(
    version: int,
    signs: Signs,
    calls: CallSyntax,
    *,
    models: str,
    thinks: bool = False,
) -> Family:
    return Family(
        name=f"mistral-v{version}" + ("-thinking" if thinks else ""),
        summary=f"{models}: Tekken, version {version}" + (", with reasoning" if thinks else ""),
        signs=signs,
        encoder=MistralEncoder(version=version, thinks=thinks),
        roles=_ROLES,
        early_roles=_INSTRUCTING if version == 3 else frozenset(),
        shows_tools=True,
        tools_before_turns=True,
        syntax=ReplySyntax(reasoning=_THINKING if thinks else None, calls=calls),
    )


MISTRAL_V3 = _family(
    3,
    Signs(tokens=_TOKENS, tekken="v3", template=("[AVAILABLE_TOOLS]",), not_template=(_SYSTEM,)),
    LIST_CALLS,
    models="Mistral Nemo",
)
MISTRAL_V7 = _family(
    7,
    Signs(tokens=(*_TOKENS, _SYSTEM), tekken="v7", template=(_SYSTEM,), not_template=(ARGS,)),
    LIST_CALLS,
    models="Mistral Small 3 and 3.1",
)
MISTRAL_V11 = _family(
    11,
    Signs(tokens=(*_TOKENS, _SYSTEM, ID_MARK, ARGS), tekken="v11", template=(_SYSTEM, ID_MARK, ARGS)),
    NAMED_CALLS_WITH_IDS,
    models="Mistral Small 3.2",
)
MISTRAL_V13 = _family(
    13,
    Signs(tokens=(*_TOKENS, _SYSTEM, ARGS), tekken="v13", template=(_SYSTEM, ARGS), not_template=(ID_MARK,)),
    NAMED_CALLS,
    models="later Mistral",
)
MISTRAL_V13_THINKING = _family(
    13,
    Signs(
        tokens=(*_TOKENS, _SYSTEM, ARGS, THINK, THINK_END),
        tekken="v13",
        template=(_SYSTEM, ARGS, THINK),
        not_template=(ID_MARK,),
    ),
    NAMED_CALLS,
    models="later Magistral",
    thinks=True,
)
