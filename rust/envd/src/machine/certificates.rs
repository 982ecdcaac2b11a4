//! A certificate authority of the host, trusted by the guest's programs.

use std::fs;
use std::io;
use std::path::Path;

use super::replace_file;

/// Where Debian, Ubuntu and Alpine keep the authorities that OpenSSL, curl, git and Python trust.
const BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Kept when the distribution rebuilds its bundle.
const LOCAL_COPY: &str = "/usr/local/share/ca-certificates/aenv.crt";

const BEGIN: &str = "# BEGIN aenv\n";
const END: &str = "# END aenv\n";

/// Adds `pem` to the trusted authorities, in place of what was added before.
///
/// # Errors
/// When a file cannot be written.
pub fn install(pem: &str) -> io::Result<()> {
    for path in [LOCAL_COPY, BUNDLE].map(Path::new) {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
    }
    replace_file(Path::new(LOCAL_COPY), pem.as_bytes())?;
    let current = fs::read_to_string(BUNDLE).unwrap_or_default();
    replace_file(Path::new(BUNDLE), bundle_with(&current, pem).as_bytes())
}

fn bundle_with(current: &str, pem: &str) -> String {
    let mut bundle = match (current.find(BEGIN), current.find(END)) {
        (Some(begin), Some(end)) if begin < end => format!("{}{}", &current[..begin], &current[end + END.len()..]),
        _ => current.to_owned(),
    };
    if !bundle.is_empty() && !bundle.ends_with('\n') {
        bundle.push('\n');
    }
    format!("{bundle}{BEGIN}{}\n{END}", pem.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_only_its_own_part() {
        let first = bundle_with("debian", "one\n");
        assert_eq!(first, "debian\n# BEGIN aenv\none\n# END aenv\n");
        assert_eq!(bundle_with(&first, "two"), "debian\n# BEGIN aenv\ntwo\n# END aenv\n");
    }
}
