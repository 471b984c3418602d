"""From what was read to what happened and why: events, runs, series, facts, rules, judgement."""
