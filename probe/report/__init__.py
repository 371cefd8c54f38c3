"""Renderers of a comparison: terminal, Markdown, JSON, JUnit XML, HTML. Each module is one of them."""
