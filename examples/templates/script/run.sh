#!/bin/sh
# A coordinator and two silos on this machine, each a process of its own, and one job from its first round to
# its last: sh run.sh [PORT]. Everything is put below run/, which is made anew each time.
set -eu
cd "$(dirname "$0")"
PORT=${1:-7443}
rm -rf run
mkdir -p run/north run/south

roundtable ca init run/ca
roundtable ca issue hub --role coordinator --host 127.0.0.1 --ca run/ca --out run/hub
roundtable ca issue ada --role operator --ca run/ca --out run/ada
for silo in north south; do
    roundtable ca issue "$silo" --role agent --ca run/ca --out "run/$silo/credentials"
    printf 'coordinator = "127.0.0.1:%s"\ncredentials = "credentials"\n' "$PORT" > "run/$silo/agent.toml"
done

# Whatever happens, nothing that was started here stays.
trap 'kill $STARTED 2> /dev/null || true; wait' EXIT
trap 'exit 130' INT TERM
STARTED=
roundtable server --listen "127.0.0.1:$PORT" --state run/state --credentials run/hub > run/coordinator.log 2>&1 &
STARTED="$STARTED $!"
for silo in north south; do
    python train_starter.py "run/$silo/agent.toml" > "run/$silo/script.log" 2>&1 &
    STARTED="$STARTED $!"
done

export ROUNDTABLE_COORDINATOR="127.0.0.1:$PORT" ROUNDTABLE_CREDENTIALS=run/ada
TRIES=0
until roundtable clients list > /dev/null 2>&1; do
    TRIES=$((TRIES + 1))
    [ "$TRIES" -lt 60 ] || { echo "The coordinator did not start:"; cat run/coordinator.log; exit 1; }
    sleep 1
done
roundtable job submit job.toml --watch
