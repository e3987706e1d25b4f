"""Any other ChatML model: its own template, as far as that goes; ours where the model brings none."""

from stenograph.core.messages import Role
from stenograph.render.families.family import Family
from stenograph.render.families.smollm2 import chatml_template

_WITHOUT_TOOLS = frozenset(Role) - {Role.TOOL, Role.DEVELOPER}


def chatml(own_template: str | None) -> Family:
    """The family of a ChatML model with this template. What the template never mentions, it cannot show."""
    if own_template is None:
        return Family(
            name="chatml",
            template_source=chatml_template(""),
            roles=frozenset(Role),
            shows_tools=True,
            tools_before_turns=True,
        )
    shows_tools = "tools" in own_template and "tool_calls" in own_template
    return Family(
        name="chatml",
        template_source=None,
        roles=_WITHOUT_TOOLS | {Role.TOOL} if shows_tools else _WITHOUT_TOOLS,
        shows_tools=shows_tools,
        tools_before_turns=False,
    )
