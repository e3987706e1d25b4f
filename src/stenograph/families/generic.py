"""Any template as it stands: what it shows is seen by rendering, and if it is append-only it is served."""

from stenograph.text.family import Family

TEMPLATE = Family(name="template", summary="any other chat template, as it stands", tools_before_turns=False)
