"""A model that is divided before it has values begins with the very values of the single process."""

from __future__ import annotations
