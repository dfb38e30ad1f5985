"""DiLoCo (Douillard et al.) and its streaming form: many local steps, then an outer step."""
