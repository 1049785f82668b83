"""Drawings of a timeline: text, SVG, PNG, and a trace for Perfetto."""
