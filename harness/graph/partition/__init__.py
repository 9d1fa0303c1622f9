"""How a graph is cut into regions and regions are compared: flow, outline, wiring, canonical form."""
