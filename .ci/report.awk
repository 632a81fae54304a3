# Reads "go test -v ./...". Prints one line a package, everything of a package
# that failed, and the tests that were skipped. Exits 1 on a failure, and on a
# skip when CI is set.

/^[ \t]*--- SKIP: / { skips[++n] = $0; want = 1; held[++lines] = $0; next }
want && /^[ \t]+[^ \t]+\.go:[0-9]+: / { skips[n] = skips[n] " " $0; want = 0 }

# The line that ends a package.
/^(ok|FAIL|\?)[ \t]+[^ \t]+/ {
	if ($1 == "FAIL") {
		failed = 1
		for (i = 1; i <= lines; i++) print held[i]
	}
	if ($1 != "?") print
	fflush()
	lines = 0
	next
}

/^FAIL$/ { failed = 1; next }
/^(PASS|testing: warning: no tests to run)$/ { next }
{ held[++lines] = $0; want = want && /^[ \t]/ }

END {
	for (i = 1; i <= lines; i++) print held[i]
	for (i = 1; i <= n; i++) print "skipped:" skips[i]
	if (n > 0 && ENVIRON["CI"] != "") {
		print "a test was skipped, which CI does not allow"
		exit 1
	}
	exit failed
}
