"""What the agent keeps: samples, log lines, incidents, in SQLite or PostgreSQL.

``location``   where a store is: ``/path/file.db``, ``sqlite:///…``, ``postgresql://…``
``schema``     the tables
``migrations`` numbered steps from one schema to the next
``database``   opens a store to write or to read, checks it, puts a broken file aside
``dictionary`` small numbers for hosts, clocks, GPUs, engines, processes
``inserts``    INSERTs in the words of either database
``clock``      notices when the wall clock is set
``rows``       records to rows of integers; ``samples`` rows back to records
``batch``      one transaction of new records
``lanes``      what waits to be written, bounded
``session``    the write connection over its life
``access``     whether this user may use it
``lease``      one agent at a time writes a host's records
``writer``     the thread that owns it
``queries``    windows of samples, last samples, log lines, engines
``incidents``  incidents, written and read
``excerpts``   what an incident can be judged again by
``rollup``     10 s, 1 min and 1 h tiers
``retention``  limits by age and by size
``chores``     both, in small steps
``export``     samples as rows of a recording
"""
