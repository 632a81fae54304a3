# What the author tried. Prints how many of it work.
ok=0
[ "$(sh versions.sh 1.9 1.10)" = '<' ] && ok=$((ok+1))
[ "$(sh versions.sh v2.0 1.0)" = '>' ] && ok=$((ok+1))
echo "$ok of 2"
