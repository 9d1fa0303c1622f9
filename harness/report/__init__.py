"""From journals to tables, plots and the page. `load` gives a results folder as pandas frames."""
