"""What other monitors read of the agent: figures that it holds in memory anyway.

``metrics``   the table of all metrics: names, labels, units, and what they mean
``snapshot``  what the agent knows at one moment, as plain records
``peaks``     maxima since whoever asks has asked before
``labels``    labels of a series, made safe and written once
``families``  a snapshot to the samples of the metrics
``engines``, ``agent``  the same for engines and for the agent itself
``text``      samples to a page, in Prometheus' text format or OpenMetrics; ``page`` packs it ahead
``server``    the page over HTTP
``access``    who may read it: TLS and passwords
``textfile``  the page as a file for node_exporter
``otlp``      samples and incidents as OTLP/HTTP JSON; ``push`` sends it
"""
