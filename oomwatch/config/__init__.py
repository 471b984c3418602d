"""The configuration: a TOML file, environment variables and flags to frozen dataclasses.

``values``     kinds of values: durations, sizes, shares, paths, secrets
``headers``    HTTP headers, in the file or in one of their own
``quantities`` times and sizes as text
``fields``     how a key is declared
``schema``     every key with its default and its sentence; ``detection`` those of the rules
``layers``     default < file < environment < flag, with the origin of each value
``load``       all of it together, and every mistake with its key
``paths``      where the configuration and the database are
``secrets``    values that files and systemd credentials hold
``texts``      the example file, the reference, the merged configuration for people

    loaded = load_config()
    loaded.config.agent.sampling_interval_seconds
"""

from oomwatch.config.load import ConfigError, Loaded, load_config
from oomwatch.config.schema import Config, EngineConfig

__all__ = ["Config", "ConfigError", "EngineConfig", "Loaded", "load_config"]
