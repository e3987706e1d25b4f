"""Chat templates: how a model's Jinja template is compiled, fed and rendered."""
