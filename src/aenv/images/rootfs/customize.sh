#!/bin/sh
# mmdebstrap's customize hook: makes a plain installation the `base` template's. $1 is the root of the new tree.
set -eu
root=$1

# The user commands run as: home from /etc/skel, everything allowed by sudo, no password to guess.
chroot "$root" useradd --create-home --shell /bin/bash --uid 1000 --user-group user
chroot "$root" passwd --quiet --lock root
chroot "$root" passwd --quiet --lock user
printf 'user ALL=(ALL:ALL) NOPASSWD: ALL\n' > "$root/etc/sudoers.d/user"
chmod 0440 "$root/etc/sudoers.d/user"

# What template builds and SDK helpers (pip, npm, git) write to as `user`.
install -d -m 0777 "$root/code"
chmod 0777 "$root/usr/local"
find "$root/usr/local" -mindepth 1 -type d -exec chmod 0777 {} +

printf 'LANG=C.UTF-8\n' > "$root/etc/default/locale"
printf 'localhost\n' > "$root/etc/hostname"
printf '127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n' > "$root/etc/hosts"

# The whole machine is one environment: pip may install into it.
printf '[global]\nbreak-system-packages = true\ndisable-pip-version-check = true\n' > "$root/etc/pip.conf"

# apt in the guest: small, quiet, and without what the build machine needed to reach its mirror.
rm -f "$root/etc/apt/apt.conf.d/99mmdebstrap" "$root/etc/apt/apt.conf.d/00build"
cat > "$root/etc/apt/apt.conf.d/90aenv" <<'END'
APT::Install-Recommends "false";
Acquire::Languages "none";
END

# Identity belongs to a sandbox, not to the image all of them share.
: > "$root/etc/machine-id"
rm -f "$root/var/lib/dbus/machine-id" "$root"/etc/ssh/ssh_host_*

# Regenerated when needed; on disk it would only be read from it.
rm -rf "$root"/var/cache/apt/* "$root"/var/cache/debconf/*-old "$root"/var/cache/ldconfig/* \
    "$root"/var/lib/dpkg/*-old "$root"/var/log/* "$root"/tmp/* "$root"/var/tmp/* "$root"/run/*
