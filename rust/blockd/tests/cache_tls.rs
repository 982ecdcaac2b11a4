//! Origins behind TLS, with a certificate that only the environment makes trusted.

#![allow(clippy::unwrap_used)]

mod cache_common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use blockd::cache::RemoteLayer;
use cache_common::{cache, content, read, Act, Server, BLOCK_LEN};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::ServerConfig;

const SIZE: usize = 3 * BLOCK_LEN + 77;
const CHILD: &str = "BLOCKD_TEST_TLS_CHILD";

/// Reads a layer through a cache of its own, as the trust store is read from the environment. Does nothing when run as a test.
#[test]
fn child() {
    let Ok(url) = std::env::var(CHILD) else { return };
    let dir = tempfile::tempdir().unwrap();
    let cache = cache(dir.path(), 64 << 20);
    let found = cache.open_layer(RemoteLayer::new(url, SIZE as u64)).map(|layer| read(&layer, 0, SIZE));
    match found {
        Ok(bytes) => assert!(bytes.unwrap() == content(SIZE)),
        Err(error) => {
            panic!("{}", blockd::error::Error::caused(blockd::error::Code::Origin, "opening", &error).message)
        }
    }
}

fn pem(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls").join(name)
}

/// What a child said that trusts these certificates.
fn child_with(trusted: &Path, url: &str) -> (bool, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]).env(CHILD, url);
    command.env("SSL_CERT_FILE", trusted).env_remove("SSL_CERT_DIR");
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.success(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

#[test]
fn an_origin_is_read_if_its_certificate_is_trusted_and_not_otherwise() {
    let certificate = CertificateDer::from_pem_file(pem("certificate.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(pem("key.pem")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let server = Server::tls(content(SIZE), Arc::new(config));
    let url = |host: &str| format!("https://{host}:{}/layer", server.port);

    server.script([Act::Good, Act::CutAfter(BLOCK_LEN + 5)]);
    let (read, said) = child_with(&pem("certificate.pem"), &url("127.0.0.1"));
    assert!(read, "{said}");
    let asked = server.seen().len();
    assert!(asked >= 3, "the transfer that broke went on: {asked}");

    let nobody = tempfile::NamedTempFile::new().unwrap();
    for (trusted, host, why) in
        [(nobody.path(), "127.0.0.1", "UnknownIssuer"), (&pem("certificate.pem"), "localhost", "not valid for name")]
    {
        let (read, said) = child_with(trusted, &url(host));
        assert!(!read && said.contains(why), "{said}");
    }
    assert_eq!(server.seen().len(), asked, "nothing was asked of a server that is not known");
}
