"""SGLang's chat route and its native route."""
