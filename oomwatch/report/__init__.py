"""A Diagnosis as text for a terminal, JSON, Markdown or one HTML file; the page of each cause.

sanitize     the one door for text that came from inputs
json_report  contract form, with its JSON Schema in schema/
text         for a terminal: verdict, why, memory bar, evidence, remedies, what was unseen
             (layout: lines and columns; memory_bar; phrases, flags, ledgers: shared by all)
markdown     for an issue tracker
html         one self-contained file
pages        the page of every cause, in English and Chinese
locale       fixed texts, in English and Chinese
"""
