"""The command `doctor`."""

from pathlib import Path

import click
from rich.text import Text

from indexer.app.settings import Settings, load_from_environment, load_settings
from indexer.cli.command import ExitCode, command, config_file, json_option
from indexer.cli.output import progress_console, result_console, to_json
from indexer.cli.progress_bars import show_progress
from indexer.errors import SettingsError
from indexer.redaction import without_secrets
from indexer.telemetry.log import printable

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def _log_settings(_: Path | None) -> Settings:
    """Return the settings of log lines, or the defaults if they are bad: `settings` is one of the checks."""
    try:
        return load_from_environment("log_format", "log_level")
    except SettingsError:
        return Settings()


@command("doctor", load=_log_settings)
@json_option
async def doctor_command(_: Settings, *, as_json: bool) -> int:
    """Check settings, database, disk, clock, relays, directories, DNS and limits.

    Print one line for each check: `ok`, `warn` or `fail`, what was found, and what to do. Nothing is changed, except
    that the embedded Postgres is started if it is used. The checks send a few requests, by the same rules as the
    daemon, and take at most 80 seconds. The exit code is 1 if a check fails.
    """
    from indexer.cli.doctor_checks import Finding, Level, run_checks  # noqa: PLC0415 - loads all clients

    try:
        settings = load_settings(config_file())
        with show_progress("checks", None, progress_console()) as progress:
            findings = await run_checks(settings, lambda done, total: progress.update(done, total=total))
    except SettingsError as error:  # without settings there is nothing else to check
        findings = [Finding("settings", Level.FAIL, str(error), "Correct it; docs/settings.md lists all settings.")]
    failed = any(finding.level is Level.FAIL for finding in findings)
    if as_json:
        click.echo(to_json({"ok": not failed, "checks": [finding.to_dict() for finding in findings]}))
    else:
        for finding in findings:
            text = f"{finding.check}: {finding.found}" + (f". {finding.action}" if finding.action else "")
            line = Text(f"{finding.level:<4}", STYLES[finding.level]).append(
                f"  {printable(without_secrets(text))}", ""
            )
            result_console().print(line, soft_wrap=True)
    return ExitCode.FAILED if failed else ExitCode.OK
