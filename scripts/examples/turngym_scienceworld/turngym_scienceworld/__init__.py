"""ScienceWorld for turngym: importing it registers the environment, and starts nothing."""

from turngym.envs import register

register("scienceworld/ScienceWorld-v0", "turngym_scienceworld.env:ScienceWorldEnv", max_turns=100)
