"""Owns the page of a report: one HTML file that needs nothing else. Judges nothing, reads no file.

``gather`` turns what was found into plain data, ``render`` the data into the page.
"""

from ds4q.quantize.page.data import gather
from ds4q.quantize.page.render import is_page, load_template, render

__all__ = ["gather", "is_page", "load_template", "render"]
