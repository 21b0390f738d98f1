"""A comparison of policies as one HTML page (pure): charts as inline SVG, no script, nothing from the network.

Owns the input types, intervals over seeds, and the drawing. Must not know what measured: `router ab` and
`router simulate` both describe their results as a `Comparison`.
"""
