"""Statistical units, derived in the database: `python app.py` shows it, `shiftwork worker app.py` works on."""

from pathlib import Path

import psycopg

import shiftwork

app = shiftwork.App()

report = app.sql_task("report_units", handler="units.report(jsonb)", queue="analytics")
"""Declared from Python; the others are in the registry already, by units.sql."""

REPORT = """
create or replace function units.report(payload jsonb) returns jsonb language sql as $$
  select to_jsonb(figures) from units.figures where region = payload ->> 'region'
$$
"""


def main() -> None:
    """Install it, write some establishments, let a worker derive what follows from them, and show it."""
    app.migrate()
    with psycopg.connect(app.settings.dsn or "", autocommit=True) as connection:
        if connection.execute("select to_regclass('units.figures')").fetchone() == (None,):
            connection.execute((Path(__file__).parent / "units.sql").read_bytes())
        connection.execute(REPORT)
        for region, employees in (("north", 12), ("south", 7), ("north", 30)):
            connection.execute(
                "insert into units.establishment (region, employees) values (%s, %s)", (region, employees)
            )
        for task, many in connection.execute("select task, count(*) from shiftwork.jobs group by task"):
            print(f"{many} job of {task} waits")

    app.run_worker(stop_when_idle=True)  # collects, then derives
    asked = report.enqueue(region="north")
    app.run_worker(stop_when_idle=True)
    print(asked.result(timeout=5))


if __name__ == "__main__":
    main()
