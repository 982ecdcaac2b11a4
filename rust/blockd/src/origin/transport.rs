//! The HTTP client: one pool of connections for all origins of a cache.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hickory_resolver::TokioResolver;
use http::{HeaderMap, Request, Response, Uri};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::{ClientConfig, RootCertStore};

use super::{OriginError, OriginOptions};

/// Shorter than servers and their load balancers keep idle connections, so that few are found dead.
const IDLE: Duration = Duration::from_secs(15);

/// Connections to origins: HTTP/1.1 over TCP or TLS (rustls with the system's trust store).
pub struct Transport(Client<HttpsConnector<HttpConnector<Dns>>, Empty<Bytes>>);

impl Transport {
    /// Reads the trust store and prepares a client. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`OriginError::Client`]: TLS cannot be set up.
    pub fn new(options: &OriginOptions) -> Result<Self, OriginError> {
        let mut tcp = HttpConnector::new_with_resolver(Dns::default());
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(options.connect_timeout));
        tcp.set_keepalive(Some(IDLE));
        let https =
            HttpsConnectorBuilder::new().with_tls_config(tls()?).https_or_http().enable_http1().wrap_connector(tcp);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(options.demand_requests + options.background_requests)
            .build(https);
        Ok(Self(client))
    }

    /// Sends a GET request and returns the response's head with its body still to be read.
    pub(super) async fn get(&self, uri: Uri, headers: HeaderMap) -> Result<Response<Incoming>, OriginError> {
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        self.0.request(request).await.map_err(|error| OriginError::Request(causes(&error)))
    }
}

/// The system's trust store. One that is missing or damaged is no error here: origins without TLS need none, and
/// with none no certificate is trusted.
fn tls() -> Result<ClientConfig, OriginError> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    if let Some(error) = found.errors.first() {
        tracing::warn!(%error, "part of the system's certificate store cannot be read");
    }
    roots.add_parsable_certificates(found.certs);
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| OriginError::Client(error.to_string()))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// An error with its causes: hyper's own message alone says little.
pub(super) fn causes(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        message = format!("{message}: {cause}");
        next = cause.source();
    }
    message
}

/// Names resolved without the C library, whose resolver cannot be linked statically.
#[derive(Clone, Default)]
struct Dns(Arc<tokio::sync::OnceCell<TokioResolver>>);

impl tower_service::Service<Name> for Dns {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let resolver = self.0.clone();
        Box::pin(async move {
            let build = || async { Ok::<_, std::io::Error>(TokioResolver::builder_tokio()?.build()) };
            let resolver = resolver.get_or_try_init(build).await?;
            let found: Vec<IpAddr> = resolver.lookup_ip(name.as_str()).await?.iter().collect();
            Ok(found.into_iter().map(|address| SocketAddr::new(address, 0)).collect::<Vec<_>>().into_iter())
        })
    }
}
