"""The agent: clocks, threads and queues around the stages. It watches and tells, and never acts.

``engines``   which engines run, and what is kept of each
``messages``  what threads hand to the detector
``explain``   an incident's diagnosis, from the store and the followed logs
``conditions`` readings to triggers
``failures``  what logs say, and how processes ended
``detector``  the one thread that judges: triggers, incidents, explanations
``feeds``     what is read all the time: GPUs, pages, host, kernel
``following`` which engines run, and all that follows them
``excerpt``   what is stored beside an incident, to judge it again
``service``   all threads, signals, readiness, the watchdog
``record``    the agent as the sources of a recording
``replay``    a recording through the detector and the store, by a clock of its own
"""
