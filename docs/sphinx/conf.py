"""Sphinx's settings for the documentation site.

``docs/build_site.py`` copies the guides and writes the pages of the API reference; autodoc fills these from docstrings.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from sphinx.ext.autodoc.mock import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import weftplan  # noqa: E402

absent = mock(["torch"])
absent.__enter__()  # during the whole build: the reference is the same with and without PyTorch
warnings.filterwarnings("ignore", "weftplan.torch was tested with", UserWarning)

project = "weftplan"
author = copyright = "The weftplan authors"
version = release = weftplan.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "docstrings",
    "references",
]
nitpicky = True
autosummary_generate = False  # docs/build_site.py writes the pages
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 100
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = f"weftplan {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "collapse_navigation": True,
    "footer_end": [],
    "footer_start": ["copyright"],
    "header_links_before_dropdown": 6,
    "navbar_end": ["theme-switcher"],
    "pygments_dark_style": "github-dark",
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": False,
}
